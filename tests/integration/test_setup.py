"""`make setup`, as far as it needs no package index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support.nats_server import free_port
from tests.support.processes import ROOT

MADE_S_MAX = 120.0
HOLD = "import sys; from build_lock import alone\nwith alone(): print('holds', flush=True); sys.stdin.read()"
FOLLOW = "from build_lock import alone\nwith alone(): print('follows', flush=True)"
GIVE_UP = "from build_lock import alone\nwith alone(0.1): pass"
NO_PACKAGE = f"no-such-package-of-baton==1 --hash=sha256:{64 * '0'}\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """With the scripts only."""
    (tmp_path / "scripts").mkdir()
    for name in ("setup.py", "build_lock.py"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    return tmp_path


def python(checkout: Path, code: str) -> subprocess.Popen[str]:
    """Runs ``code`` as a script of the checkout does."""
    env = {**os.environ, "PYTHONPATH": str(checkout / "scripts")}
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=checkout, env=env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_a_second_make_waits_for_the_first_and_names_it(checkout: Path):
    with python(checkout, HOLD) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "holds\n"
        assert "in this checkout for over 0.1 s: end it" in python(checkout, GIVE_UP).communicate(timeout=MADE_S_MAX)[0]
        with python(checkout, FOLLOW) as second:
            assert second.stdout is not None
            said = second.stdout.readline()
            first.communicate(timeout=MADE_S_MAX)
            assert second.stdout.readline() == "follows\n"

    assert "pytest" in said, "the command that was typed"
    assert f"(pid {first.pid}), which installs or compiles in this checkout" in said


def test_a_lock_ends_with_its_process(checkout: Path):
    with python(checkout, HOLD) as first:
        assert first.stdout is not None
        first.stdout.readline()
        first.kill()

    assert python(checkout, FOLLOW).communicate(timeout=MADE_S_MAX)[0] == "follows\n"


def test_without_a_network_it_says_what_cannot_be_reached_once(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    (checkout / ".baton").mkdir()
    (checkout / "requirements").mkdir()
    for lock in ("uv", "services"):
        (checkout / "requirements" / f"{lock}.txt").write_text(NO_PACKAGE)
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / ".venv/bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (checkout / ".venv/bin/python").chmod(0o700)
    index = f"https://127.0.0.1:{free_port()}/simple"
    monkeypatch.setenv("PIP_INDEX_URL", index)
    monkeypatch.setenv("PIP_RETRIES", "1")

    said = python(checkout, "import setup; setup.install('services')").communicate(timeout=MADE_S_MAX)[0]

    assert said.count(f"{index} cannot be reached: Connection refused. Check the network") == 1
    assert "Retrying" not in said
    assert "pip installs everything" not in said
    assert "Retrying" in (checkout / ".baton/setup.log").read_text()


def test_an_environment_whose_making_was_interrupted_is_made_anew(checkout: Path):
    """Ctrl-C in the first seconds of `make up` leaves one without pip, in which nothing can be installed."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(checkout / ".venv")

    def run(*command: str) -> None:
        env = {**os.environ, "PYTHONPATH": str(checkout / "scripts")}
        subprocess.run(command, cwd=checkout, env=env, check=True, timeout=MADE_S_MAX)

    run(sys.executable, "-c", "import setup; setup.make_venv('none')")
    run(str(checkout / ".venv/bin/python"), "-m", "pip", "--version")
