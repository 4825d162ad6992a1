"""Two hosts for a test: network namespaces with a cable between them, each with an empty home folder."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.processes import ROOT
from tests.support.system import STOP_S_MAX, end_with_the_tests, environment, until

START_S_MAX = 120.0
COMMAND_S_MAX = 60.0
ADDRESSES = ("10.0.0.1", "10.0.0.2")
MEETING = f"{ADDRESSES[0]}:9700"
"""Where the ranks of an engine over both meet."""
DAY_AHEAD = "unshare --time --monotonic 86400 --fork --kill-child"
"""Runs a command whose monotonic clock is a day ahead of this machine's."""


@dataclass
class Host:
    """A network namespace, a home folder, and the folder in which a person types."""

    namespace: str
    device: str
    address: str
    folder: Path
    settings: Mapping[str, str]
    """Variables of all that runs there."""

    def __post_init__(self) -> None:
        (self.folder / "home").mkdir(parents=True)
        (self.folder / ".venv").symlink_to(ROOT / ".venv")  # This is what `make setup` leaves.
        self.log = self.folder / "log"

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in environment().items() if not name.startswith("XDG_")}
        return {**kept, **self.settings, "HOME": str(self.folder / "home"), "COLUMNS": "80"}

    def arguments(self, line: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *shlex.split(line, comments=True)]

    def run(self, line: str) -> str:
        """A command of the page, to its end."""
        line, _, target = line.partition(" > ")
        done = subprocess.run(
            self.arguments(line), cwd=self.folder, env=self.environment, capture_output=True, text=True,
            timeout=COMMAND_S_MAX, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        if target:
            (self.folder / target).write_text(done.stdout)
        return done.stdout

    @contextmanager
    def running(self, line: str) -> Iterator[subprocess.Popen[bytes]]:
        """A command of the page that runs until Ctrl-C; nothing of it is left afterwards."""
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                self.arguments(line),
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_the_tests,  # noqa: PLW1509  # one system call between fork and exec
            )
        try:
            yield process
        finally:
            family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S_MAX)
            finally:
                for each in [each for each in family if each.is_running()]:
                    each.kill()

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_said(self, text: str, s_max: float = START_S_MAX) -> None:
        try:
            until(lambda: text in self.said(), f"{self.namespace} says {text!r}", s_max)
        except AssertionError as error:
            logs = (self.folder / "home").rglob("*.log")
            raise AssertionError(
                "\n".join([str(error), self.said(), *(f"--- {log}\n{log.read_text()[-2000:]}" for log in logs)])
            ) from error

    def link_bytes(self) -> int:
        """What has come over the cable."""
        shown = subprocess.run(
            ["ip", "-n", self.namespace, "-json", "-stats", "link", "show", self.device],
            capture_output=True, check=True, timeout=COMMAND_S_MAX,
        )  # fmt: skip
        received: int = json.loads(shown.stdout)[0]["stats64"]["rx"]["bytes"]
        return received

    def set_link(self, state: str) -> None:
        command("ip", "-n", self.namespace, "link", "set", self.device, state)


def command(*arguments: str) -> None:
    subprocess.run(arguments, check=True, capture_output=True, timeout=COMMAND_S_MAX)


@contextmanager
def typing_on(host: Host) -> Iterator[None]:
    """This process's connections are that host's until the ``with`` block ends. Its children see this machine's devices
    in ``/sys`` all the same: start what looks there with ``Host.arguments``.
    """
    setns = ctypes.CDLL(None, use_errno=True).setns
    with Path("/proc/thread-self/ns/net").open() as before, Path(f"/run/netns/{host.namespace}").open() as there:
        assert setns(there.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            setns(before.fileno(), 0)


@contextmanager
def two_hosts(folder: Path, settings: Mapping[str, str]) -> Iterator[tuple[Host, Host]]:
    """Two namespaces with a cable between them. Skips the test where they cannot be made."""
    one, two = (f"baton-{os.getpid()}-{number}" for number in (1, 2))
    devices = [f"b{os.getpid()}-{number}" for number in (1, 2)]
    with ExitStack() as cleanup:
        for namespace in (one, two):
            try:
                command("ip", "netns", "add", namespace)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"network namespaces cannot be made here: {error}")
            cleanup.callback(command, "ip", "netns", "del", namespace)
        command("ip", "link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
        for namespace, device, address in zip((one, two), devices, ADDRESSES, strict=True):
            command("ip", "link", "set", device, "netns", namespace)
            command("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", device)
            command("ip", "-n", namespace, "link", "set", device, "up")
            command("ip", "-n", namespace, "link", "set", "lo", "up")
        yield (
            Host(one, devices[0], ADDRESSES[0], folder / "one", settings),
            Host(two, devices[1], ADDRESSES[1], folder / "two", settings),
        )
