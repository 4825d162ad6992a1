"""The wheel in an environment where others have packages named as Baton's folders: the same system as from a checkout,
with simulated and with real engines.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from shared import compiled
from tests.support.processes import ROOT
from tests.support.system import System

pytestmark = [pytest.mark.nats, pytest.mark.timeout(2400)]

BUILT_S_MAX = 1200.0
START_S_MAX = 120.0
ENGINES_S_MAX = 600.0
MAKE_DIST = (sys.executable, str(ROOT / "scripts/make_dist.py"))
IMPORTS = (
    "from baton_serve.services.router.native import _block_table, _placement, _tokenize;"
    "from baton_serve.services.router.relay import relay;"
    "print(_block_table.__file__, _placement.__file__, _tokenize.__file__, relay.__file__)"
)
TAKEN = ("services", "shared", "connector", "replay")
"""Names that packages of others have, too."""


def install(environment: Path, what: Path) -> None:
    command = [str(environment / "bin/python"), "-m", "pip", "install", "--quiet", str(what)]
    subprocess.run(command, cwd=environment, check=True, timeout=BUILT_S_MAX)


def output(environment: Path, code: str) -> str:
    command = [str(environment / "bin/python"), "-c", code]
    return subprocess.run(command, cwd=environment, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With packages of others, then the wheel and what it depends on, from the package index."""
    folder = tmp_path_factory.mktemp("wheel")
    was_compiled = compiled.is_current()
    build = subprocess.run(
        [*MAKE_DIST, "--here", str(folder)], capture_output=True, text=True, check=False, timeout=BUILT_S_MAX
    )
    assert build.returncode == 0, build.stdout + build.stderr
    assert compiled.is_current() is was_compiled, "the checkout keeps what was compiled there"
    (wheel,) = folder.glob("*.whl")
    for name in TAKEN:
        (folder / "acme" / name).mkdir(parents=True)
        (folder / "acme" / name / "__init__.py").write_text("OF = 'acme'\n")
    (folder / "acme/pyproject.toml").write_text(
        f'[project]\nname = "acme"\nversion = "1"\n[tool.setuptools]\npackages = {list(TAKEN)}\n'
    )
    venv.create(folder / "venv", with_pip=True)
    install(folder / "venv", folder / "acme")
    install(folder / "venv", wheel)
    return folder / "venv"


@contextmanager
def system_of(environment: Path, folder: Path, *arguments: str, s_max: float) -> Iterator[System]:
    """``baton up`` of the wheel, from an empty home."""
    home = folder / "home"
    home.mkdir()
    env = {"HOME": str(home), "PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}
    program = environment / "bin/baton"
    with System(folder / "state", *arguments, "--prefill", "1", "--decode", "1", env=env, program=program) as system:
        system.wait_ready(s_max)
        yield system


def test_packages_of_others_stay_as_they_were(environment: Path):
    told = output(environment, f"import {', '.join(TAKEN)}; print(*[each.OF for each in ({', '.join(TAKEN)})])")

    assert told.split() == ["acme"] * len(TAKEN)


def test_its_version_and_commit_are_those_of_the_checkout(environment: Path):
    def said(*command: str) -> str:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    from_wheel = said(str(environment / "bin/baton"), "--version")

    assert from_wheel == said(sys.executable, "-m", "services.launcher", "--version")
    assert said("git", "rev-parse", "HEAD").strip() in from_wheel


def test_it_holds_the_compiled_modules(environment: Path):
    loaded = output(environment, IMPORTS).split()

    assert [(Path(one).is_relative_to(environment), Path(one).suffix) for one in loaded] == 4 * [(True, ".so")]
    (wheel,) = environment.parent.glob("*.whl")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name.endswith(f"-{tag}-{tag}-linux_{platform.machine()}.whl")


def test_a_wheel_without_its_c_modules_is_made_on_demand_only(tmp_path: Path):
    broken = {**os.environ, "CC": "no-such-compiler"}

    def make(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*MAKE_DIST, "--here", str(tmp_path / "made"), *arguments]
        return subprocess.run(command, env=broken, capture_output=True, text=True, check=False, timeout=BUILT_S_MAX)

    refused = make()
    assert refused.returncode == 1
    assert (
        "baton_serve.services.router.native._tokenize, baton_serve.shared.request_path__mypyc could not be"
        in refused.stderr
    )
    assert "no-such-compiler" in refused.stderr
    assert "make wheel PURE=1" in refused.stderr
    assert not (tmp_path / "made").exists()

    accepted = make("--pure")
    (wheel,) = (tmp_path / "made").glob("*.whl")
    assert accepted.returncode == 0
    assert "routers run the Python form" in accepted.stdout
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert wheel.name.endswith("-py3-none-any.whl")


def test_a_system_serves_from_an_empty_home(environment: Path, tmp_path: Path):
    with system_of(environment, tmp_path, "--engine", "simulated", s_max=START_S_MAX) as system:
        body = {"model": "baton-tiny", "prompt": "Who runs? " * 40, "max_tokens": 8}
        answer = system.http.post("/v1/completions", json=body, headers={"x-baton-mode": "disaggregated"})
        console = system.http.get(f"http://127.0.0.1:{system.collector_port}/console")

    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8
    assert console.status_code == 200


@pytest.mark.vllm
@pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed here")
def test_real_engines_hand_kv_over(environment: Path, tmp_path: Path):
    """vLLM and NIXL are those of this environment: its packages come after those of the wheel's, and nothing of Baton's
    is among them, since an editable installation is no folder there.
    """
    here = Path(output(environment, "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (here / "engines.pth").write_text(sysconfig.get_path("purelib"))
    try:
        with system_of(environment, tmp_path, s_max=ENGINES_S_MAX) as system:
            body = {"model": "baton-tiny", "prompt": "Who runs? " * 40, "max_tokens": 8, "temperature": 0}
            answer = system.http.post("/v1/completions", json=body, headers={"x-baton-mode": "disaggregated"})
            received = system.settled_metrics().sum("baton_worker_kv_received_bytes_total", worker_id="decode-1")
    finally:
        (here / "engines.pth").unlink()

    assert answer.status_code == 200, answer.text
    assert received > 0
