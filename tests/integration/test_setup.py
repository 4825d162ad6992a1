"""`make setup`, as far as it needs no package index. The nightly ``test_interrupted_setup.py`` has one that was interrupted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
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
    for name in ("setup.py", "setup.sh", "build_lock.py"):
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


@dataclass
class Machine:
    """A checkout on a machine that has only the programs in one folder."""

    checkout: Path
    programs: Path

    def has(self, name: str, script: str) -> None:
        path = self.programs / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)

    def has_python(self, name: str, version: tuple[int, int], *, venv: bool = True) -> None:
        """Answers what ``setup.sh`` asks, and tells its name when it is chosen."""
        fits = 0 if (3, 11) <= version < (3, 14) else 1
        self.has(
            name,
            f'case "$*" in *ensurepip*) exit {int(not venv)};; *print*) echo {version[0]}.{version[1]};; '
            f"*version_info*) exit {fits};; *) echo chosen: {name};; esac",
        )

    def set_up(self, **env: str) -> str:
        command = ["/bin/sh", "scripts/setup.sh"]
        done = subprocess.run(
            command, cwd=self.checkout, env={"PATH": str(self.programs), **env}, text=True, check=False, timeout=60,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.stdout


@pytest.fixture
def machine(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    programs = tmp_path_factory.mktemp("programs")
    for name in ("dirname", "sed", "uname"):
        where = shutil.which(name)
        assert where is not None
        (programs / name).symlink_to(where)
    return Machine(checkout, programs)


@pytest.mark.parametrize("minor", [11, 12, 13])
def test_each_python_that_the_packages_are_locked_for_will_do(machine: Machine, minor: int):
    machine.has_python("python3", (3, 14))
    machine.has_python(f"python3.{minor}", (3, minor))

    assert machine.set_up() == f"chosen: python3.{minor}\n"


def test_the_python_of_an_environment_that_is_there_comes_first(machine: Machine):
    machine.has_python("python3", (3, 13))
    machine.has_python("elsewhere", (3, 11))
    (machine.checkout / ".venv").mkdir()
    (machine.checkout / ".venv/pyvenv.cfg").write_text(f"home = /x\nexecutable = {machine.programs / 'elsewhere'}\n")

    assert machine.set_up() == "chosen: elsewhere\n"
    assert machine.set_up(BATON_PYTHON="python3") == "chosen: python3\n"


def test_a_python_without_venv_is_named_with_what_it_lacks(machine: Machine):
    machine.has_python("python3", (3, 12), venv=False)

    assert "apt-get install python3.12-venv" in machine.set_up(), "Ubuntu 24.04 as it comes"


@pytest.mark.parametrize("version", [(3, 10), (3, 14)])
def test_without_a_python_that_fits_uv_brings_one(machine: Machine, version: tuple[int, int]):
    machine.has_python("python3", version)
    brought = machine.programs / "brought"
    machine.has_python("of-uv", (3, 12))
    machine.has(
        "uv",
        f'case "$2" in install) : > {brought}; exit 0;; dir) echo /home/me/pythons;; '
        f"find) [ -e {brought} ] && echo {machine.programs / 'of-uv'};; esac",
    )

    said = machine.set_up()

    assert "uv downloads 3.12 (30 MB) into /home/me/pythons\nchosen: of-uv\n" in said
    assert machine.set_up() == "chosen: of-uv\n", "it is there the next time"


def test_without_any_python_the_ways_to_get_one_are_told(machine: Machine):
    said = machine.set_up()

    assert "apt-get install python3 python3-venv" in said
    assert "astral.sh/uv/install.sh" in said
    assert "BATON_PYTHON=python3.9 is no Python 3.11" in machine.set_up(BATON_PYTHON="python3.9")


@pytest.mark.parametrize(("machine_name", "will_do"), [("x86_64", True), ("aarch64", True), ("ppc64le", False)])
def test_packages_are_locked_for_two_kinds_of_processor(machine: Machine, machine_name: str, will_do: bool):
    machine.has_python("python3", (3, 12))
    (machine.programs / "uname").unlink()
    machine.has("uname", f'[ "$1" = -s ] && echo Linux || echo {machine_name}')

    assert (machine.set_up() == "chosen: python3\n") is will_do


def test_where_no_index_has_a_cpu_build_of_torch_the_ordinary_one_does(checkout: Path):
    """The package index is reached and has none; PyTorch's own is not reached, as behind a mirror of PyPI."""
    (checkout / "requirements").mkdir()
    (checkout / "requirements/torch-pypi.txt").write_text("torch==2.0 --hash=sha256:0\n")
    code = """
import setup
asked = []
def pip(arguments, progress, environ=None):
    asked.append(" ".join(arguments[arguments.index("--requirement") + 1:] if "--requirement" in arguments else arguments))
    if "torch.txt" in asked[-1]:
        raise setup.Unreachable("no") if "--extra-index-url" in arguments else setup.SetupFailed("No matching distribution")
setup.pip, setup.uv = pip, lambda path: asked.append(path) or True
setup.LOG.parent.mkdir()
setup.install_cpu_torch("torch==2.0+cpu --hash=sha256:1")
print(asked)
"""
    said = python(checkout, code).communicate(timeout=MADE_S_MAX)[0]

    assert "taking the ordinary build, with 2 GB of libraries for GPUs" in said
    assert said.count("torch.txt") == 2
    assert "'requirements/torch-pypi.txt']" in said


def test_the_index_of_the_environment_holds_against_that_of_a_file(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    (checkout / "pip.conf").write_text("[global]\nindex-url = https://file/simple\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(checkout / "pip.conf"))
    code = f"import setup; setup.PYTHON = '{sys.executable}'; print(setup.uv_environment()['UV_DEFAULT_INDEX'])"

    assert python(checkout, code).communicate(timeout=MADE_S_MAX)[0] == "https://file/simple\n"
    monkeypatch.setenv("PIP_INDEX_URL", "https://variable/simple")
    assert python(checkout, code).communicate(timeout=MADE_S_MAX)[0] == "https://variable/simple\n"
