"""The wheel in an empty environment: the same system as from a checkout, with simulated engines."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from shared import compiled
from tests.support.processes import ROOT
from tests.support.system import System

pytestmark = [pytest.mark.nats, pytest.mark.timeout(1200)]

BUILT_S_MAX = 600.0
START_S_MAX = 120.0
MAKE_WHEEL = (sys.executable, str(ROOT / "scripts/make_wheel.py"))
IMPORTS = (
    "from services.router.native import _block_table, _placement, _tokenize; from services.router.relay import relay;"
    "print(_block_table.__file__, _placement.__file__, _tokenize.__file__, relay.__file__)"
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the wheel and what it depends on, from the package index."""
    folder = tmp_path_factory.mktemp("wheel")
    was_compiled = compiled.is_current()
    build = subprocess.run([*MAKE_WHEEL, str(folder)], capture_output=True, text=True, check=False, timeout=BUILT_S_MAX)
    assert build.returncode == 0, build.stdout + build.stderr
    assert compiled.is_current() is was_compiled, "the checkout keeps what was compiled there"
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=True)
    install = [str(folder / "venv/bin/python"), "-m", "pip", "install", "--quiet", str(wheel)]
    subprocess.run(install, cwd=folder, check=True, timeout=BUILT_S_MAX)
    return folder / "venv"


def test_it_holds_the_compiled_modules(environment: Path, tmp_path: Path):
    loaded = subprocess.run(
        [str(environment / "bin/python"), "-c", IMPORTS], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert [(Path(one).is_relative_to(environment), Path(one).suffix) for one in loaded.stdout.split()] == 4 * [
        (True, ".so")
    ]
    (wheel,) = environment.parent.glob("*.whl")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name.endswith(f"-{tag}-{tag}-linux_{platform.machine()}.whl")


def test_a_wheel_without_its_c_modules_is_made_on_demand_only(tmp_path: Path):
    broken = {**os.environ, "CC": "no-such-compiler"}

    def make(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*MAKE_WHEEL, str(tmp_path / "made"), *arguments]
        return subprocess.run(command, env=broken, capture_output=True, text=True, check=False, timeout=BUILT_S_MAX)

    refused = make()
    assert refused.returncode == 1
    assert "services.router.native._tokenize, shared.request_path__mypyc could not be" in refused.stderr
    assert "no-such-compiler" in refused.stderr
    assert "make dist PURE=1" in refused.stderr
    assert not (tmp_path / "made").exists()

    accepted = make("--pure")
    (wheel,) = (tmp_path / "made").glob("*.whl")
    assert accepted.returncode == 0
    assert "routers run their Python form" in accepted.stdout
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert wheel.name.endswith("-py3-none-any.whl")


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
