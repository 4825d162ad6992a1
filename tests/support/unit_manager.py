"""Stands in for `systemctl` where systemd does not run: starts, restarts and stops what unit files say.

It reads ExecStart, EnvironmentFile and the order of a target's units, and gives processes no other variables, as systemd
does. Pids are files beside the units. Called as a program by `baton service upgrade`, and imported by tests.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import psutil

from services.launcher.service_files.host_services import read_variables
from tests.support.system import is_alive, until

STOP_S_MAX = 60.0


def values(unit: Path, key: str) -> list[str]:
    lines = [line.partition("=") for line in unit.read_text().splitlines()]
    return [value for name, _, value in lines if name == key]


def file_of(folder: Path, unit: str) -> tuple[Path, str]:
    """The file of a unit, and what ``%i`` stands for."""
    name, is_instance, instance = unit.removesuffix(".service").partition("@")
    return (folder / f"{name}@.service", instance) if is_instance else (folder / unit, "")


def start(folder: Path, unit: str) -> None:
    file, instance = file_of(folder, unit)
    [command], [variables] = values(file, "ExecStart"), values(file, "EnvironmentFile")
    given = read_variables(Path(variables.replace("%i", instance)).read_text())
    for each in values(file, "Environment"):
        name, _, value = each.partition("=")
        given[name] = value
    with (folder / f"{unit}.log").open("ab") as log:
        process = subprocess.Popen(
            shlex.split(command), env=given, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    (folder / f"{unit}.pid").write_text(str(process.pid))


def stop(folder: Path, unit: str) -> None:
    """SIGTERM, then SIGKILL for what is left; a zombie of another parent counts as ended."""
    file = folder / f"{unit}.pid"
    if not file.exists():
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(file.read_text()))
        family = process.children(recursive=True)
        process.terminate()
        until(lambda: not is_alive(process), f"{unit} ends", STOP_S_MAX)
        for each in filter(is_alive, family):
            each.kill()
    file.unlink()


def start_target(folder: Path) -> None:
    for unit in values(folder / "baton.target", "Wants"):
        start(folder, unit)


def stop_target(folder: Path) -> None:
    for unit in reversed(values(folder / "baton.target", "Wants")):
        stop(folder, unit)


def main(folder: Path, arguments: list[str]) -> None:
    assert arguments[0] == "restart", arguments
    stop(folder, arguments[-1])
    start(folder, arguments[-1])


if __name__ == "__main__":
    main(Path(os.environ["UNIT_FOLDER"]), sys.argv[1:])
