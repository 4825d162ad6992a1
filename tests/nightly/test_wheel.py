"""The wheel in an empty environment: the same system as from a checkout, with simulated engines."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.support.system import System

pytestmark = [pytest.mark.nats, pytest.mark.timeout(1200)]

BUILT_S_MAX = 600.0
START_S_MAX = 120.0
IMPORTS = (
    "from services.router.native import _block_table, _placement; print(_block_table.__file__, _placement.__file__)"
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the wheel and what it depends on, from the package index."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), "."]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=BUILT_S_MAX)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=True)
    install = [str(folder / "venv/bin/python"), "-m", "pip", "install", "--quiet", str(wheel)]
    subprocess.run(install, cwd=folder, check=True, timeout=BUILT_S_MAX)
    return folder / "venv"


def test_it_holds_the_compiled_modules(environment: Path, tmp_path: Path):
    loaded = subprocess.run(
        [str(environment / "bin/python"), "-c", IMPORTS], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert [Path(one).is_relative_to(environment) for one in loaded.stdout.split()] == [True, True]


def test_a_system_serves_from_an_empty_home(environment: Path, tmp_path: Path):
    home = tmp_path / "home"
    home.mkdir()
    env = {"HOME": str(home), "PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}
    arguments = ("--engine", "simulated", "--prefill", "1", "--decode", "1")
    with System(tmp_path / "state", *arguments, env=env, program=environment / "bin/baton") as system:
        system.wait_ready(START_S_MAX)
        body = {"model": "baton-tiny", "prompt": "Who runs? " * 40, "max_tokens": 8}
        answer = system.http.post("/v1/completions", json=body, headers={"x-baton-mode": "disaggregated"})
        console = system.http.get(f"http://127.0.0.1:{system.collector_port}/console")

    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8
    assert console.status_code == 200
