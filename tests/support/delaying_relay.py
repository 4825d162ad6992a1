"""A relay in front of a server that delays what passes, in both directions: a network's distance, where the kernel has
no netem. The delay may change while connections live.
"""

from __future__ import annotations

import multiprocessing
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

CHUNK_BYTES = 1 << 16
CHUNKS_WAITING_MAX = 4096
"""Chunks of one direction of a connection that wait for their time; then the relay stops reading."""
STARTED_S_MAX = 30.0
Address = tuple[str, int]


@dataclass(frozen=True)
class DelayingRelay:
    address: Address
    _delay_s: Any
    """Shared with the relay's process."""

    def set_delay(self, seconds: float) -> None:
        """For each byte that comes from now on, in each direction."""
        self._delay_s.value = seconds


@contextmanager
def delaying_relay(host: str, target: Address) -> Iterator[DelayingRelay]:
    """Connections to ``DelayingRelay.address``, a port of ``host``, reach ``target``. A process of its own, with threads:
    an event loop cannot wait for less than a millisecond.
    """
    context = multiprocessing.get_context("spawn")
    delay_s, port, started = context.Value("d", 0.0), context.Value("i", 0), context.Event()
    process = context.Process(target=_serve, args=(host, target, delay_s, port, started), daemon=True)
    process.start()
    try:
        if not started.wait(STARTED_S_MAX):
            raise RuntimeError(f"the relay to {target} did not start within {STARTED_S_MAX} s")
        yield DelayingRelay((host, port.value), delay_s)
    finally:
        process.kill()
        process.join()


def _serve(host: str, target: Address, delay_s: Any, port: Any, started: Any) -> None:
    listener = socket.create_server((host, 0))
    port.value = listener.getsockname()[1]
    started.set()
    while True:
        client, _address = listener.accept()
        server = socket.create_connection(target)
        for one, other in ((client, server), (server, client)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _Direction(one, other, delay_s).start()


class _Direction:
    """What one end of a connection sends to the other."""

    def __init__(self, source: socket.socket, target: socket.socket, delay_s: Any) -> None:
        self._source = source
        self._target = target
        self._delay_s = delay_s
        self._waiting = queue.Queue[tuple[float, bytes]](CHUNKS_WAITING_MAX)

    def start(self) -> None:
        for work in (self._receive, self._send):
            threading.Thread(target=work, daemon=True).start()

    def _receive(self) -> None:
        chunk = b"-"
        while chunk:
            try:
                chunk = self._source.recv(CHUNK_BYTES)
            except OSError:
                chunk = b""
            self._waiting.put((time.monotonic() + self._delay_s.value, chunk))

    def _send(self) -> None:
        with suppress(OSError):
            while True:
                due_at, chunk = self._waiting.get()
                if (wait_s := due_at - time.monotonic()) > 0:
                    time.sleep(wait_s)
                if not chunk:
                    break
                self._target.sendall(chunk)
        for end in (self._source, self._target):  # An end of one direction ends both.
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
