"""Bytes between simulated engines over TCP, where NIXL is not installed: a TransferAgent for a few bytes per block.

A read is a request on one connection, answered by the holder's agent from memory that it has registered.
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

from connector.transfer.agent import Region, Spans, TransferFailed, TransferState

ANSWER_S_MAX = 1.0
"""For a peer to send what was asked of it."""
READERS_MAX = 1024
"""Connections at a time; one more is refused."""
SPANS_MAX = 65_536
"""Of one read."""
_LENGTH = 4


class _Address(msgspec.Struct, frozen=True):
    name: str
    host: str
    port: int


class TcpAgent:
    """Listens on ``host``, at a port of the system's choice."""

    def __init__(self, name: str, host: str) -> None:
        self._name = name
        self._regions: list[Region] = []
        self._peers: dict[str, socket.socket] = {}
        self._listening = socket.create_server((host, 0))
        self._readers: set[socket.socket] = set()
        threading.Thread(target=self._listen, name="simulated-kv", daemon=True).start()

    def register(self, regions: Sequence[Region]) -> None:
        """Make memory readable by others."""
        self._regions.extend(regions)

    def metadata(self) -> bytes:
        """Where to connect to."""
        host, port = self._listening.getsockname()[:2]
        return msgspec.msgpack.encode(_Address(self._name, host, port))

    def connect(self, metadata: bytes) -> str:
        """Know that agent. Raises TransferFailed."""
        try:
            address = msgspec.msgpack.decode(metadata, type=_Address)
            peer = socket.create_connection((address.host, address.port), timeout=ANSWER_S_MAX)
        except (OSError, msgspec.DecodeError) as error:
            raise TransferFailed(f"connecting: {error}") from error
        self.forget(address.name)
        self._peers[address.name] = peer
        return address.name

    def forget(self, name: str) -> None:
        """Disconnect; harmless when unknown."""
        if (peer := self._peers.pop(name, None)) is not None:
            peer.close()

    def read(self, name: str, remote: Spans, local: Spans, *, device: str, remote_device: str) -> Any:
        """Copy each remote span over the local one: over when it returns. Raises TransferFailed."""
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
        """Over."""
        state: TransferState = handle
        return state

    def release(self, handle: Any) -> bool:
        """Nothing runs on."""
        del handle
        return True

    def close(self) -> None:
        """Close all connections, including those of engines that read from this one."""
        for one in (self._listening, *list(self._readers)):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # Wakes the thread that waits on it.
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
                    self._answer(reader)
        except OSError:
            return
        finally:
            self._readers.discard(reader)

    def _answer(self, reader: socket.socket) -> None:
        """Raises OSError when the reader is gone, or asks for what is not its to read."""
        count = int.from_bytes(_receive(reader, _LENGTH), "big")
        if count > SPANS_MAX:
            raise OSError("too many spans")
        spans = np.frombuffer(_receive(reader, count * 16), dtype=np.uint64).reshape(count, 2).tolist()
        if not all(self._has(address, length) for address, length in spans):
            raise OSError("memory that was not registered")
        reader.sendall(b"".join(ctypes.string_at(address, length) for address, length in spans))

    def _has(self, address: int, length: int) -> bool:
        return any(one.base <= address and address + length <= one.base + one.length for one in self._regions)


def _receive(peer: socket.socket, size: int) -> bytes:
    """Raises OSError when it ends before."""
    data = bytearray()
    while len(data) < size:
        piece = peer.recv(size - len(data))
        if not piece:
            raise OSError("the connection was closed")
        data += piece
    return bytes(data)
