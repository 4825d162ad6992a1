"""The simulated engine's KV exchange: implements ``EngineExchange``, and moves block contents between engines.

A mover is the connector's copier with a transfer agent (memory, TCP or NIXL), on the engine's thread or on its own. The
agent over TCP serves where NIXL is not installed and is made for a few bytes per block: a read is a request on one
connection, and the holder's agent replies with bytes of its registered memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from connector.layout.routes import ReaderRank
from connector.layout.tensors import PROTOCOL_VERSION
from connector.messages import EngineCall, EngineNotification, Orders, Results
from connector.transfer.agent import Connecting, Opened, Region, Spans, TransferAgent, TransferFailed, TransferState
from connector.transfer.memory_agent import MemoryNetwork
from connector.worker.connections import PROBE_BYTES, Own
from connector.worker.transfer_thread import Copier, TransferThread
from services.worker.engines.port import EngineDead
from services.worker.engines.simulated.core.block_cache import CONTENT_BYTES
from services.worker.engines.simulated.core.engine_core import EngineCore
from services.worker.engines.simulated.core.groups import group_plan
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvHandshake, KvLayer, KvPlane, KvRank
from shared.sockets import family_of

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
        self._listening = socket.create_server((host, 0), family=family_of(host))
        self._readers: set[socket.socket] = set()
        threading.Thread(target=self._listen, name="simulated-kv", daemon=True).start()

    def register(self, regions: Sequence[Region]) -> None:
        self._regions.extend(regions)

    def metadata(self) -> bytes:
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
        state: TransferState = handle
        return state

    def release(self, handle: Any) -> bool:
        del handle
        return True

    def notify(self, name: str, message: bytes) -> None:
        """Raises TransferFailed: simulated engines get grants over the bus alone."""
        del name, message
        raise TransferFailed("notifying: not over TCP")

    def notices(self) -> list[bytes]:
        return []

    def close(self) -> None:
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


assert CONTENT_BYTES == PROBE_BYTES, "the space after the last block is for probes"

POLL_S = 0.002
"""Interval of polls while a thread moves blocks."""
THIS_PROCESS = MemoryNetwork()
"""Simulated engines of one process reach each other without NIXL."""

MakeAgent = Callable[[str], TransferAgent]
"""Factory of agents from names, which are never reused."""


class Mover(Protocol):
    """Executes the orders of an engine's exchange."""

    def submit(self, orders: Orders) -> None:
        """Start these orders."""

    def take_results(self) -> Results:
        """Results since the last call."""

    def wake_on_results(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, possibly on another thread, when there are results. Without a thread there are none before
        ``take_results`` is called.
        """

    def close(self) -> None:
        """Abort transfers."""


class DirectMover:
    """Copies on the caller's thread when polled, for agents that never block and for virtual time."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier

    def submit(self, orders: Orders) -> None:
        self._copier.submit(orders)

    def take_results(self) -> Results:
        self._copier.advance()
        return self._copier.take_results()

    def wake_on_results(self, wake: Callable[[], None]) -> None:
        """See ``Mover``."""

    def close(self) -> None:
        self._copier.close()


def direct_mover(core: EngineCore, agent: TransferAgent, fingerprint: str, clock: Callable[[], float]) -> DirectMover:
    """A mover on the caller's thread. Registers the engine's memory."""
    return DirectMover(Copier(agent, _register_blocks(core, agent, fingerprint), clock))


def threaded_mover(
    core: EngineCore, agent: TransferAgent, fingerprint: str, clock: Callable[[], float]
) -> TransferThread:
    """A mover on a separate thread, for agents that block. Registers the engine's memory."""
    own = _register_blocks(core, agent, fingerprint)
    return TransferThread(lambda: Copier(agent, own, clock))


def agent_name(worker_id: str, epoch: int) -> str:
    """A unique name: peers identify connections by it."""
    return f"{worker_id}-{epoch}-{uuid.uuid4().hex[:8]}"


def _register_blocks(core: EngineCore, agent: TransferAgent, fingerprint: str) -> Own:
    """Register the contents of the engine's blocks with the agent, and set the engine's handshake."""
    settings, cache = core.settings, core.cache
    size = CONTENT_BYTES * settings.kv_blocks
    agent.register([Region(cache.address, size + PROBE_BYTES, "cpu", 0)])
    plane = KvPlane(offset=0, head_bytes=CONTENT_BYTES, heads=1, total=1)
    groups = group_plan(settings.groups, settings.block_size).groups
    layers = [
        KvLayer(name=f"layer.{group}", group=group, base=cache.address, block_stride=CONTENT_BYTES, planes=[plane])
        for group in range(len(groups))
    ]
    memory = KvRank(rank=0, agent=agent.metadata(), device="cpu", device_id=0, layers=layers)
    handshake = KvHandshake(
        worker_id=WorkerId(settings.worker_id),
        epoch=Epoch(settings.epoch),
        version=PROTOCOL_VERSION,
        fingerprint=fingerprint,
        clock_s=0.0,
        hash_block_size=settings.block_size,
        alignment=settings.block_size,
        groups=list(groups),
        blocks=settings.kv_blocks,
        ranks=[memory],
    )
    core.exchange.describe(handshake)
    return Own(ReaderRank(memory, ranks=1), handshake, cache.address + size)


def open_mover(core: EngineCore, fingerprint: str, clock: Callable[[], float]) -> Mover:
    """The mover that the settings choose; the engine closes it."""
    settings = core.settings
    name = agent_name(settings.worker_id, settings.epoch)
    if settings.transfer == "nixl":
        from connector.transfer.nixl_agent import NixlAgent  # A machine for simulated workers may have no NIXL.

        return threaded_mover(core, NixlAgent(name, backend=settings.kv_backend), fingerprint, clock)
    if settings.transfer == "tcp":
        return threaded_mover(core, TcpAgent(name, settings.host), fingerprint, clock)
    return direct_mover(core, THIS_PROCESS.agent(name), fingerprint, clock)


def nixl_package_of(transfer: str) -> str:
    """See ``EngineExchange``. ``transfer``: how KV moves."""
    if transfer != "nixl":
        return ""
    from connector.transfer.nixl_agent import PACKAGE  # A machine for simulated workers may have no NIXL.

    return PACKAGE


class SimulatedExchange:
    """An ``EngineExchange``. The engine's loop calls ``poll``."""

    def __init__(self, core: EngineCore, mover: Mover, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self.nixl_package = nixl_package_of(core.settings.transfer)
        self._core = core
        self._mover = mover
        self._clock = clock
        self._wake = wake
        self._listeners: list[Callable[[EngineNotification], None]] = []
        self._closed = False

    async def call(self, call: EngineCall) -> EngineNotification:
        """Returns immediate results; later ones arrive as notifications. Raises EngineDead."""
        if self._closed:
            raise EngineDead("the engine was closed")
        notifications = self._core.call(call, self._clock())
        self._wake()
        return notifications

    def on_notifications(self, listener: Callable[[EngineNotification], None]) -> None:
        self._listeners.append(listener)

    def poll(self) -> bool:
        """Run the mover and deliver notifications; returns whether the core got results and must advance again."""
        orders = self._core.exchange.take_orders()
        if orders:
            self._mover.submit(orders)
        results = self._mover.take_results() if self.moving or orders else None
        if results:
            self._core.results(results, self._clock())
        notifications = self._core.exchange.take_notifications()
        if notifications is not None:
            for listener in self._listeners:
                listener(notifications)
        return bool(results)

    @property
    def moving(self) -> bool:
        return self._core.exchange.moving

    def close(self) -> None:
        self._closed = True
        self._mover.close()
