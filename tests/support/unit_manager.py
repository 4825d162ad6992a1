"""Stands in for `systemctl` where systemd does not run: starts and stops what a unit file says.

It reads ExecStart and EnvironmentFile, and gives the process no other variables, as systemd does.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import psutil

from tests.support.system import is_alive, until

STOP_S_MAX = 120.0


def start(unit: Path) -> psutil.Popen:
    """Its output goes to a file beside the unit."""
    [command], [variables] = values(unit, "ExecStart"), values(unit, "EnvironmentFile")
    given = read_variables(Path(variables).read_text())
    with unit.with_suffix(".log").open("ab") as log:
        return psutil.Popen(
            shlex.split(command), env=given, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def stop(process: psutil.Popen) -> list[psutil.Process]:
    """SIGTERM, then SIGKILL for what is left, which is returned."""
    family = process.children(recursive=True)
    process.terminate()
    until(lambda: process.poll() is not None, "the unit ends", STOP_S_MAX)
    left = [each for each in family if is_alive(each)]
    for each in left:
        each.kill()
    return left


def values(unit: Path, key: str) -> list[str]:
    lines = [line.partition("=") for line in unit.read_text().splitlines()]
    return [value for name, _, value in lines if name == key]


def read_variables(text: str) -> dict[str, str]:
    """Variables of a file with or without quotes."""
    lines = [line.partition("=") for line in text.splitlines() if line]
    return {name: _unquoted(value) for name, _, value in lines}


def _unquoted(value: str) -> str:
    return re.sub(r"\\(.)", r"\1", value[1:-1]) if value.startswith('"') else value
