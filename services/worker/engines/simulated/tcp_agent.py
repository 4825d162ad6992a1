"""A TransferAgent over TCP, for simulated engines where NIXL is not installed. It is made for a few bytes per block.

A read is a request on one connection; the holder's agent replies with bytes of its registered memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from connector.transfer.agent import Connecting, Opened, Region, Spans, TransferFailed, TransferState

REPLY_S_MAX = 1.0
"""Time limit for a peer to send the requested bytes."""
READERS_MAX = 1024
"""Concurrent incoming connections; further ones are closed."""
SPANS_MAX = 65_536
"""Spans in one read."""
_LENGTH = 4


class _Address(msgspec.Struct, frozen=True):
    name: str
    host: str
    port: int


class TcpAgent:
    """Listens on ``host``, at a port that the operating system assigns."""

    def __init__(self, name: str, host: str) -> None:
        self._name = name
        self._regions: list[Region] = []
        self._peers: dict[str, socket.socket] = {}
        self._listening = socket.create_server((host, 0))
        self._readers: set[socket.socket] = set()
        threading.Thread(target=self._listen, name="simulated-kv", daemon=True).start()

    def register(self, regions: Sequence[Region]) -> None:
        """Make memory readable by peers."""
        self._regions.extend(regions)

    def metadata(self) -> bytes:
        """The packed address of the agent."""
        host, port = self._listening.getsockname()[:2]
        return msgspec.msgpack.encode(_Address(self._name, host, port))

    def connect(self, metadata: bytes) -> Connecting:
        """Connect to an agent. Raises TransferFailed."""
        try:
            address = msgspec.msgpack.decode(metadata, type=_Address)
            peer = socket.create_connection((address.host, address.port), timeout=REPLY_S_MAX)
        except (OSError, msgspec.DecodeError) as error:
            raise TransferFailed(f"connecting: {error}") from error
        self.forget(address.name)
        self._peers[address.name] = peer
        return Opened(self, address.name)

    def forget(self, name: str) -> None:
        """Disconnect; does nothing for an unknown name."""
        if (peer := self._peers.pop(name, None)) is not None:
            peer.close()

    def read(self, name: str, remote: Spans, local: Spans, *, device: str, remote_device: str) -> Any:
        """Copy each remote span to the local one; complete on return. Raises TransferFailed."""
        del device, remote_device
        peer = self._peers.get(name)
        if peer is None:
            raise TransferFailed(f"reading: {name} is not connected")
        spans = np.ascontiguousarray(remote[:, :2])
        try:
            peer.sendall(len(spans).to_bytes(_LENGTH, "big") + spans.tobytes())
            data = _receive(peer, int(spans[:, 1].sum()))
        except OSError as error:
            self.forget(name)
            raise TransferFailed(f"reading: {error}") from error
        at = 0
        for address, length in local[:, :2].tolist():
            ctypes.memmove(address, data[at : at + length], length)
            at += length
        return TransferState.DONE

    def state(self, handle: Any) -> TransferState:
        """Always done, since ``read`` blocks."""
        state: TransferState = handle
        return state

    def release(self, handle: Any) -> bool:
        """Always True: no transfer can still be running."""
        del handle
        return True

    def close(self) -> None:
        """Close the listener and all connections, incoming and outgoing."""
        for one in (self._listening, *list(self._readers)):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # Wakes the thread that blocks on it.
            one.close()
        for name in list(self._peers):
            self.forget(name)

    def _listen(self) -> None:
        while True:
            try:
                reader, _ = self._listening.accept()
            except OSError:
                return
            if len(self._readers) >= READERS_MAX:
                reader.close()
                continue
            self._readers.add(reader)
            threading.Thread(target=self._serve, args=(reader,), name="simulated-kv-reader", daemon=True).start()

    def _serve(self, reader: socket.socket) -> None:
        try:
            with reader:
                while True:
                    self._reply(reader)
        except OSError:
            return
        finally:
            self._readers.discard(reader)

    def _reply(self, reader: socket.socket) -> None:
        """Serve one read. Raises OSError if the reader disconnects or requests memory that is not registered."""
        count = int.from_bytes(_receive(reader, _LENGTH), "big")
        if count > SPANS_MAX:
            raise OSError("too many spans")
        spans = np.frombuffer(_receive(reader, count * 16), dtype=np.uint64).reshape(count, 2).tolist()
        if not all(self._has(address, length) for address, length in spans):
            raise OSError("the memory is not registered")
        reader.sendall(b"".join(ctypes.string_at(address, length) for address, length in spans))

    def _has(self, address: int, length: int) -> bool:
        return any(one.base <= address and address + length <= one.base + one.length for one in self._regions)


def _receive(peer: socket.socket, size: int) -> bytes:
    """Raises OSError if the connection ends first."""
    data = bytearray()
    while len(data) < size:
        piece = peer.recv(size - len(data))
        if not piece:
            raise OSError("the connection was closed")
        data += piece
    return bytes(data)
