"""The locked packages on each Python and kind of processor, and the project itself on each Python that is here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from scripts.pythons import MINORS, pythons
from tests.support.nats_server import free_port
from tests.support.processes import ROOT
from tests.support.system import until

pytestmark = pytest.mark.timeout(7200)

UV = str(Path(sys.executable).with_name("uv"))
NOT_THERE = re.compile(r"python|pip|uvx?$|pyenv")
"""Programs that only others than the one Python bring."""
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

    command = [UV, "pip", "install", "--dry-run", "--no-deps", "--require-hashes"]
    command += ["--python-platform", platform, "--python-version", f"3.{minor}", "--only-binary", ":all:"]
    command += [argument for name in SOURCES for argument in ("--no-binary", name)]
    done = subprocess.run(
        [*command, "--target", str(tmp_path / "target"), "-r", str(path)],
        capture_output=True, text=True, check=False, timeout=INDEX_S_MAX,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(params=pythons(), ids=lambda path: path.name)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    return Root(request.param, tmp_path)


class Root:
    """A clone on a machine that has this Python only, and an empty home. What uv has downloaded before stays."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.clone, self.programs = python, folder / "clone", folder / "programs"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(self.clone)], check=True)
        self.programs.mkdir()
        for path in (path for each in os.get_exec_path() for path in Path(each).glob("*")):
            if not NOT_THERE.match(path.name) and not (self.programs / path.name).is_symlink():
                (self.programs / path.name).symlink_to(path)
        for name in (python.name, "python3"):
            (self.programs / name).symlink_to(python)
        dropped = re.compile("VIRTUAL_ENV|PYTEST_|PYENV_|PYTHON|BATON_")
        kept = {name: value for name, value in os.environ.items() if not dropped.match(name)}
        cache = subprocess.run([UV, "cache", "dir"], capture_output=True, text=True, check=True).stdout.strip()
        (folder / "home").mkdir()
        self.env = kept | {"PATH": str(self.programs), "HOME": str(folder / "home"), "UV_CACHE_DIR": cache}

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=self.clone, env=self.env, text=True, check=False, timeout=MADE_S_MAX,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:]
        return done.stdout


def test_the_readmes_commands_pass_with_one_python(root: Root):
    """`make up` until it answers, and the tests: quick ones, and those of the KV exchange with engines."""
    port, *others = (free_port() for _ in range(3))
    ports = f"--port {port} --collector-port {others[0]} --nats-port {others[1]}"
    log = root.clone.with_name("up.log")
    with log.open("wb") as output:
        up = subprocess.Popen(
            ["make", "up", f"ARGS={ports}"], cwd=root.clone, env=root.env, stdout=output, stderr=output,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    try:
        until(lambda: "Baton is ready" in log.read_text() or up.poll() is not None, "it is ready", MADE_S_MAX)
        assert up.poll() is None, log.read_text()[-6000:]
        body = {"model": "baton-tiny", "prompt": "Once upon a time", "max_tokens": 32}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120, trust_env=False)
        assert answer.status_code == 200, answer.text
        assert "decode-1" in root.run(".venv/bin/baton", "explain")
        root.run("make", "down")
        assert up.wait(120) == 0, log.read_text()[-6000:]
    finally:
        if up.poll() is None:
            os.killpg(up.pid, signal.SIGTERM)
            up.wait(120)
    assert "no C compiler found" not in log.read_text()
    version = root.run(".venv/bin/python", "-c", "import sys; print('python%d.%d' % sys.version_info[:2])").strip()
    assert version == root.python.name

    root.run("make", "setup-dev")
    for tests in (QUICK, ENGINES):
        root.run(".venv/bin/python", "-m", "pytest", "-q", "-m", "not gpu", "-n", "2", *tests)
