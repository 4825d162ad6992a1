"""The locked packages on each Python and kind of processor, and the project itself on each Python that is here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT

pytestmark = pytest.mark.timeout(3600)

MINORS = (11, 12, 13)
LOCKS = ("services", "dev", "engine-cpu", "engine-cuda", "engine-cuda-0.33", "torch-pypi")
PLATFORMS = ("x86_64-manylinux_2_34", "aarch64-manylinux_2_34")
"""With glibc 2.34, which is older than that of Debian 12, Ubuntu 22.04 or RHEL 9."""
SOURCES = ("nkeys",)
"""Pure Python that is published without a wheel."""
INDEX_S_MAX = 300.0
MADE_S_MAX = 2400.0
QUICK = ("tests/unit", "tests/contracts", "tests/properties")
ENGINES = ("tests/engines/system", "tests/engines/test_exchange.py")


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("minor", MINORS)
@pytest.mark.parametrize("lock", LOCKS)
def test_each_locked_package_can_be_had(lock: str, minor: int, platform: str, tmp_path: Path):
    """As a file whose hash is locked. torch's CPU build is left out: only PyTorch's index has it."""
    text = (ROOT / "requirements" / f"{lock}.txt").read_text()
    path = tmp_path / "lock.txt"
    path.write_text(re.sub(r"^torch==\S+\+cpu(?:.*\\\n)*.*\n", "", text, flags=re.MULTILINE))

    command = [
        str(Path(sys.executable).with_name("uv")),
        "pip",
        "install",
        "--dry-run",
        "--no-deps",
        "--require-hashes",
    ]
    command += ["--python-platform", platform, "--python-version", f"3.{minor}", "--only-binary", ":all:"]
    command += [argument for name in SOURCES for argument in ("--no-binary", name)]
    done = subprocess.run(
        [*command, "--target", str(tmp_path / "target"), "-r", str(path)],
        capture_output=True, text=True, check=False, timeout=INDEX_S_MAX,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-2000:]


def other_pythons() -> list[str]:
    """Paths of the supported Pythons that run here, without the one that runs this."""
    names = [f"python3.{minor}" for minor in MINORS if minor != sys.version_info.minor]
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(name) or "" for name in names]
    candidates += [str(path) for name in names for path in sorted(kept.glob(f"*/bin/{name}"))]
    found: dict[str, str] = {}
    for path in filter(None, candidates):
        asked = subprocess.run([path, "-c", "import ensurepip, venv"], capture_output=True, check=False)
        if asked.returncode == 0:
            found.setdefault(Path(path).name, path)
    return list(found.values())


@pytest.mark.parametrize("engine", ["none", "cpu"])
@pytest.mark.parametrize("python", other_pythons() or [pytest.param("", marks=pytest.mark.skip("no other Python"))])
def test_the_project_passes_its_tests_on_other_pythons(python: str, engine: str, tmp_path: Path):
    """From a clone: the set-up, the compiled parts and the quick tests; with an engine, those of the KV exchange."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tmp_path / "clone")], check=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("VIRTUAL_ENV", "PYTEST_"))}
    env |= {"BATON_PYTHON": python, "BATON_ENGINE": engine}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path / "clone", env=env, text=True, check=False, timeout=MADE_S_MAX,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:]
        return done.stdout

    made = run("make", "setup-dev")
    assert "no C compiler found" not in made
    version = run(".venv/bin/python", "-c", "import sys; print('python%d.%d' % sys.version_info[:2])").strip()
    assert version == Path(python).name
    run(".venv/bin/python", "-m", "pytest", "-q", "-m", "not gpu", "-n", "2", *(QUICK if engine == "none" else ENGINES))
