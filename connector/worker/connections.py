"""Connections of this rank to its peers, one per worker and epoch, kept until an order ends them or they fail.

A connection counts as made when a few bytes have been read over it (a probe), because NIXL reports a wrong address or a
closed port only at the first read. A connection that fails is reported, so that the worker connects again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from connector.layout.routes import ReaderRank, Route, routes_to
from connector.layout.tensors import why_not
from connector.messages import Connected, Peer, PeerKey
from connector.transfer.agent import Connecting, TransferAgent, TransferFailed, TransferState, failing
from shared.contracts.kv_exchange import KvHandshake, KvRank

log = logging.getLogger("baton.connector")

OPEN_S_MAX = 30.0
"""Time limit for the agent to register all memory for a connection; several connections may wait for one another."""
CONNECT_S_MAX = 5.0
"""Time limit for the first read over an opened connection."""
PROBE_BYTES = 8
FIRST = 0
"""The rank of a peer that looks for notices."""


@dataclass(frozen=True, slots=True)
class Own:
    """The rank that reads, and a handshake of its engine that lists this rank only."""

    reader: ReaderRank
    handshake: KvHandshake
    scratch: int
    """Address of PROBE_BYTES of registered CPU memory, the destination of probes."""

    @property
    def memory(self) -> KvRank:
        """Destination of reads."""
        return self.reader.memory


@dataclass(slots=True)
class Connection:
    """To one epoch of a peer: the agent names and routes of those of its ranks that this rank reads from."""

    handshake: KvHandshake
    since_s: float
    opening: dict[int, Connecting] = field(default_factory=dict)
    """Connections that are being opened, by the peer's rank; empty when it is open."""
    opened_s: float = 0.0
    names: dict[int, str] = field(default_factory=dict)
    """Agents by the peer's rank."""
    routes: list[Route] = field(default_factory=list)
    probes: list[Any] = field(default_factory=list)
    """Reads under way that test the connection; empty when it works."""


class Connections:
    """All connections of one rank."""

    def __init__(self, agent: TransferAgent, own: Own, clock: Callable[[], float]) -> None:
        self._agent = agent
        self._own = own
        self._clock = clock
        self._connections: dict[PeerKey, Connection] = {}
        self.connected: list[Connected] = []
        """Ended connection attempts and lost connections; the caller empties the list."""

    @property
    def busy(self) -> bool:
        return any(one.opening or one.probes for one in self._connections.values())

    def of(self, key: PeerKey) -> Connection | None:
        return self._connections.get(key)

    def connect(self, peer: Peer) -> None:
        """Begin to connect; ends with one ``Connected``. An existing connection is kept."""
        key = (peer.handshake.worker_id, peer.handshake.epoch)
        known = self._connections.get(key)
        if known is None:
            self._connect(key, peer.handshake)
        elif not known.opening and not known.probes:
            self.connected.append(Connected(key, 0.0))

    def _connect(self, key: PeerKey, handshake: KvHandshake) -> None:
        connection = Connection(handshake, self._clock())
        self._connections[key] = connection
        with self._losing(key):
            if failure := why_not(self._own.handshake, handshake, is_whole=False):
                raise TransferFailed(failure)
            connection.routes = routes_to(self._own.reader, handshake)
            for rank in sorted({route.rank for route in connection.routes}):
                connection.opening[rank] = self._agent.connect(handshake.ranks[rank].agent)
            self._check_opening(connection)

    @contextmanager
    def _losing(self, key: PeerKey) -> Iterator[None]:
        """Whatever fails inside is a lost peer: an engine outlives whatever a peer sends as its handshake."""
        try:
            with failing("connecting"):
                yield
        except TransferFailed as failed:
            log.info("cannot connect to %s", key[0], exc_info=failed)
            self.lose(key, str(failed))

    def _check_opening(self, connection: Connection) -> None:
        """Test the connection once it is open. Raises TransferFailed."""
        names = {rank: one.name() for rank, one in connection.opening.items()}
        opened = {rank: name for rank, name in names.items() if name is not None}
        if len(opened) == len(names):
            connection.names, connection.opening = opened, {}
            connection.opened_s = self._clock()
            self._begin_probes(connection)
        elif self._clock() - connection.since_s > OPEN_S_MAX:
            raise TransferFailed(f"the connection was not opened within {OPEN_S_MAX} s")

    def _begin_probes(self, connection: Connection) -> None:
        peer = connection.handshake
        for route in connection.routes:
            name, rank = connection.names[route.rank], peer.ranks[route.rank]
            there = np.array([[route.remote[0], PROBE_BYTES, rank.device_id]], dtype=np.uint64)
            here = np.array([[self._own.scratch, PROBE_BYTES, 0]], dtype=np.uint64)
            probe = self._agent.read(name, there, here, device="cpu", remote_device=rank.device)
            connection.probes.append(probe)

    def check(self) -> None:
        """Check connections that are being opened or tested."""
        for key in [key for key, one in self._connections.items() if one.opening]:
            with self._losing(key):
                self._check_opening(self._connections[key])
        for key in [key for key, one in self._connections.items() if one.probes]:
            with self._losing(key):
                self._check_probes(key, self._connections[key])

    def _check_probes(self, key: PeerKey, connection: Connection) -> None:
        """Raises TransferFailed."""
        states = {self._agent.state(probe) for probe in connection.probes}
        took_s = self._clock() - connection.since_s
        if TransferState.FAILED in states:
            raise TransferFailed("the first read failed")
        if TransferState.RUNNING not in states:
            self._release_probes(connection)
            self.connected.append(Connected(key, took_s))
        elif self._clock() - connection.opened_s > CONNECT_S_MAX:
            raise TransferFailed(f"no byte could be read within {CONNECT_S_MAX} s")

    def notify(self, key: PeerKey, message: bytes) -> None:
        """Send a message to the peer's first rank, if this rank is connected to it."""
        connection = self._connections.get(key)
        name = connection.names.get(FIRST) if connection is not None and not connection.probes else None
        if name is None:
            return
        try:
            with failing("notifying"):
                self._agent.notify(name, message)
        except TransferFailed as failed:  # The bus brings it, too. What is broken shows at the next read.
            log.info("no notice to %s", key[0], exc_info=failed)

    def lose(self, key: PeerKey, failure: str) -> None:
        """Report a connection as failed and drop it. Unknown peers are ignored."""
        connection = self._connections.get(key)
        if connection is not None:
            self.forget(key)
            self.connected.append(Connected(key, self._clock() - connection.since_s, failure))

    def forget(self, key: PeerKey) -> None:
        """Disconnect: no byte of a read from this peer moves any more. Unknown peers are ignored."""
        connection = self._connections.pop(key, None)
        if connection is None:
            return
        for one in connection.opening.values():
            one.cancel()
        for name in connection.names.values():
            self._agent.forget(name)
        self._release_probes(connection)

    def close(self) -> None:
        for key in list(self._connections):
            self.forget(key)

    def _release_probes(self, connection: Connection) -> None:
        for probe in connection.probes:
            self._agent.release(probe)
        connection.probes.clear()
