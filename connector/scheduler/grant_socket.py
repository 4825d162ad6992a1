"""Grants between engines of one machine: from one EngineCore to the other, past both workers and the bus.

The last grant of a streamed handoff delays the first token of its request. Over the bus it passes two workers and a
server, which may share their cores with a model. A Unix datagram takes a fraction of a millisecond, and only what the
system has put into the receiver's queue counts as sent: every other grant takes the bus.

Only processes of the engine's user can send to the socket. The reader accepts a grant for its ask id: 128 random bits
that no other worker than the holder knows.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from shared.contracts.kv_exchange import KvGrant, is_sound_grant

PREFIX = "kv-grants-"
"""Prefix of a socket's file name; the rest is random, so that containers cannot mistake each other's paths."""
GRANT_BYTES_MAX = 1 << 17
"""More than a grant of LEASE_BLOCKS_MAX blocks has."""
CLOSE_S_MAX = 2.0
log = logging.getLogger("baton.connector")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(KvGrant).decode


def new_socket_path(folder: Path) -> str:
    """Where an engine could receive grants; never used before."""
    return str(folder / f"{PREFIX}{secrets.token_hex(8)}")


class GrantSocket:
    """Receives on a thread of its own, and sends from any. ``path`` is empty if it cannot receive."""

    def __init__(self, path: str, on_grant: Callable[[KvGrant], None]) -> None:
        self.path = path
        self._on_grant = on_grant
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._thread: threading.Thread | None = None
        self._is_closing = False
        if path:
            self._listen()

    def send(self, path: str, grant: KvGrant) -> bool:
        """Whether the grant is in the queue of the engine that receives at ``path``. Never waits."""
        if not is_socket_path(path):
            return False
        try:
            self._sender.sendto(_encode(grant), path)
        except OSError:  # On another machine, in another container, ended, or slow to read.
            return False
        return True

    def close(self) -> None:
        """Stop receiving."""
        self._is_closing = True
        with suppress(OSError):
            self._receiver.shutdown(socket.SHUT_RDWR)  # ends its ``recv``
        if self._thread is not None:
            self._thread.join(CLOSE_S_MAX)
            Path(self.path).unlink(missing_ok=True)
        else:
            self._receiver.close()
        self._sender.close()

    def _listen(self) -> None:
        try:
            self._receiver.bind(self.path)
            Path(self.path).chmod(0o600)
        except OSError as error:
            log.warning("grants of other engines take the bus: no socket at %s: %s", self.path, error)
            self.path = ""
            return
        self._thread = threading.Thread(target=self._receive, name="kv-grants", daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        try:
            while packed := self._next():
                try:
                    grant = _decode(packed)
                except msgspec.MsgspecError:
                    continue
                if is_sound_grant(grant):
                    self._on_grant(grant)
        finally:
            self._receiver.close()  # From now on sending to it fails, and grants take the bus.

    def _next(self) -> bytes:
        """The next datagram; empty when the socket closes."""
        while not (packed := self._receiver.recv(GRANT_BYTES_MAX)):
            if self._is_closing:
                break
        return packed


def is_socket_path(path: str) -> bool:
    """Whether it looks like one of ``new_socket_path``: another engine names it."""
    return path.startswith("/") and "\0" not in path and path.rpartition("/")[2].startswith(PREFIX)
