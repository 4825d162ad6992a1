"""What `make dist` makes, and its wheels in environments where others have packages named as Baton's folders: the same
system as from a checkout, with simulated and with real engines.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.pythons import pythons
from shared import compiled
from tests.support.processes import ROOT
from tests.support.system import System

pytestmark = [pytest.mark.nats, pytest.mark.timeout(4800)]

BUILT_S_MAX = 1200.0
RELEASE_S_MAX = 3600.0
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


HERE = "here"
"""The wheel of `make wheel`."""
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def made(folder: Path, *options: str, s_max: float = BUILT_S_MAX) -> Path:
    """The folder, with what scripts/make_dist.py makes."""
    was_compiled = compiled.is_current()
    build = subprocess.run(
        [*MAKE_DIST, *options, str(folder)], capture_output=True, text=True, check=False, timeout=s_max
    )
    assert build.returncode == 0, build.stdout + build.stderr
    assert compiled.is_current() is was_compiled, "the checkout keeps what was compiled there"
    return folder


def install(environment: Path, *what: str) -> None:
    command = [str(environment / "bin/python"), "-m", "pip", "install", "--quiet", *what]
    subprocess.run(command, cwd=environment, check=True, timeout=BUILT_S_MAX)


def output(environment: Path, code: str) -> str:
    command = [str(environment / "bin/python"), "-c", code]
    return subprocess.run(command, cwd=environment, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make dist` makes."""
    return made(tmp_path_factory.mktemp("release"), s_max=RELEASE_S_MAX)


@pytest.fixture(scope="module", params=[HERE, *pythons()], ids=lambda one: getattr(one, "name", one))
def environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With packages of others, then the wheel and what it depends on, from the package index."""
    folder = tmp_path_factory.mktemp("wheel")
    python = Path(sys.executable) if request.param == HERE else request.param
    dist = made(folder / "dist", "--here") if request.param == HERE else request.getfixturevalue("release")
    for name in TAKEN:
        (folder / "acme" / name).mkdir(parents=True)
        (folder / "acme" / name / "__init__.py").write_text("OF = 'acme'\n")
    (folder / "acme/pyproject.toml").write_text(
        f'[project]\nname = "acme"\nversion = "1"\n[tool.setuptools]\npackages = {list(TAKEN)}\n'
    )
    subprocess.run([str(python), "-m", "venv", str(folder / "venv")], check=True, timeout=BUILT_S_MAX)
    install(folder / "venv", str(folder / "acme"))
    install(folder / "venv", "--find-links", str(dist), f"baton-serve=={VERSION}")
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


def test_its_modules_in_c_are_loaded(environment: Path):
    loaded = output(environment, IMPORTS).split()

    assert [(Path(one).is_relative_to(environment), Path(one).suffix) for one in loaded] == 4 * [(True, ".so")]


def test_a_release_has_a_wheel_for_each_python_and_machine(release: Path):
    found = {}
    for wheel in release.glob("*-manylinux*.whl"):
        [tag] = re.findall(r"-(cp\d+)-\1-", wheel.name)
        [machine] = [each for each in ELF_MACHINES if wheel.name.endswith(f"_{each}.whl")]
        found[tag, machine] = wheel
    wanted = {f"cp{each.name.removeprefix('python').replace('.', '')}" for each in pythons()}
    assert found.keys() == {(tag, machine) for tag in wanted for machine in {platform.machine(), "aarch64"}}

    for (tag, machine), wheel in found.items():
        with zipfile.ZipFile(wheel) as packed:
            native = [name for name in packed.namelist() if name.endswith(".so")]
            assert {name.rpartition(".cpython-")[2] for name in native} == {
                f"{tag.removeprefix('cp')}-{machine}-linux-gnu.so"
            }
            for name in native:
                assert int.from_bytes(packed.read(name)[18:20], "little") == ELF_MACHINES[machine], name


def test_a_release_has_sources_sboms_and_the_sums_of_all_its_files(release: Path):
    listed = dict(line.split("  ")[::-1] for line in (release / "SHA256SUMS").read_text().splitlines())
    boms = {path.name: json.loads(path.read_text()) for path in release.glob("*.cdx.json")}

    assert listed == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in release.iterdir()
        if path.name != "SHA256SUMS"
    }
    assert f"baton_serve-{VERSION}.tar.gz" in listed
    assert {"baton-services.cdx.json", "baton-engine-cpu.cdx.json", "baton-engine-cuda.cdx.json"} <= boms.keys()
    for name, bom in boms.items():
        locked = re.findall(r"^([\w.-]+)==", (ROOT / "requirements" / f"{name[6:-9]}.txt").read_text(), re.MULTILINE)
        assert {each["name"] for each in bom["components"]} == set(locked), name
        for each in bom["components"]:
            assert any(other.get("hashes") for other in each["externalReferences"]), (name, each["name"])


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
    if not (environment.parent / "dist").exists():
        pytest.skip("vLLM is that of the wheel made here")
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
