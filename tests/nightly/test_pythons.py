"""The locked packages on each Python and kind of processor, and the project itself on each Python that is here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from scripts.pythons import MINORS, pythons
from tests.support.nats_server import free_port
from tests.support.processes import ROOT
from tests.support.system import GUARD_S_MAX, STOP_S_MAX, until

pytestmark = pytest.mark.timeout(10_800)

UV = str(Path(sys.executable).with_name("uv"))
NOT_THERE = re.compile(r"python|pip|uvx?$|pyenv")
"""Programs that only others than the one Python bring."""
LOCKS = ("services", "dev", "dist", "uv", "engine-cpu", "engine-cuda", "engine-cuda-0.33", "torch-pypi")
PLATFORMS = ("x86_64-manylinux_2_34", "aarch64-manylinux_2_34")
"""With glibc 2.34, which is older than that of Debian 12, Ubuntu 22.04 or RHEL 9."""
SOURCES = ("nkeys",)
"""Pure Python that is published without a wheel."""
INDEX_S_MAX = 300.0
MADE_S_MAX = 2400.0
TESTED_S_MAX = 5400.0
OURS = re.compile("VIRTUAL_ENV|PYTEST_|PYENV_|PYTHON|BATON_|MAKE|MFLAGS|(TEST_PROFILE|ARGS|JOBS|K)$")
"""What this process has from its Python, from pytest and from the `make` that runs it: a person's shell has none of it."""


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
        kept = {name: value for name, value in os.environ.items() if not OURS.match(name)}
        cache = subprocess.run([UV, "cache", "dir"], capture_output=True, text=True, check=True).stdout.strip()
        (folder / "home").mkdir()
        self.env = kept | {"PATH": str(self.programs), "HOME": str(folder / "home"), "UV_CACHE_DIR": cache}

    def run(self, *command: str, s_max: float = MADE_S_MAX) -> str:
        done = subprocess.run(
            command, cwd=self.clone, env=self.env, text=True, check=False, timeout=s_max,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:]
        return done.stdout

    @contextmanager
    def up(self, *arguments: str) -> Iterator[Up]:
        """`make up` in a terminal of its own, ready."""
        port, *others = (free_port() for _ in range(3))
        options = f"--port {port} --collector-port {others[0]} --nats-port {others[1]}"
        log = self.clone.with_name("up.log")
        with log.open("wb") as output:
            make = subprocess.Popen(
                ["make", "up", f"ARGS={' '.join([options, *arguments])}"], cwd=self.clone, env=self.env,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        try:
            until(lambda: "Baton is ready" in log.read_text() or make.poll() is not None, "it is ready", MADE_S_MAX)
            assert make.poll() is None, log.read_text()[-6000:]
            yield Up(make, f"http://127.0.0.1:{port}", log, self.clone)
        finally:
            if make.poll() is None:
                os.killpg(make.pid, signal.SIGTERM)
                make.wait(STOP_S_MAX)


@dataclass(frozen=True)
class Up:
    """A system that runs in ``folder``."""

    make: subprocess.Popen[bytes]
    endpoint: str
    log: Path
    folder: Path

    def chat(self) -> str:
        """The text of an answer."""
        messages = [{"role": "user", "content": "Once upon a time"}]
        body = {"model": "baton-tiny", "messages": messages, "max_tokens": 32}
        answer = httpx.post(f"{self.endpoint}/v1/chat/completions", json=body, timeout=120, trust_env=False)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    def ended(self) -> int:
        """The exit status of `make`; none of the system's processes is left."""
        code = self.make.wait(STOP_S_MAX)
        until(lambda: not self.processes(), "all processes have ended", GUARD_S_MAX)
        return code

    def processes(self) -> list[psutil.Process]:
        return [one for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(self.folder)]


def test_the_readmes_commands_pass_with_one_python(root: Root):
    """`make up` with both kinds of engine, until a chat is answered and it is stopped, and `make test`."""
    with root.up() as up:
        assert up.chat()
        assert "decode-1" in root.run(".venv/bin/baton", "explain")
        root.run("make", "down")
        assert up.ended() == 0, up.log.read_text()[-6000:]
    assert "no C compiler found" not in up.log.read_text()
    version = root.run(".venv/bin/python", "-c", "import sys; print('python%d.%d' % sys.version_info[:2])").strip()
    assert version == root.python.name

    with root.up("--engine", "simulated") as up:
        assert up.chat()
        assert len(up.processes()) > 5
        os.killpg(up.make.pid, signal.SIGINT)  # As a terminal does for Ctrl-C.
        assert up.ended() == -signal.SIGINT, up.log.read_text()[-6000:]

    if version != f"python3.{sys.version_info.minor}":  # On this one all tests have run anyway.
        root.run("make", "test", s_max=TESTED_S_MAX)
