"""The peers that this rank can read from: one connection to each life of a worker, kept until told or until it breaks.

A connection counts when a few bytes have been read over it. Whatever ends it without an order is reported, so that it
is made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from connector.layout.compatibility import why_not
from connector.layout.routes import ReaderRank, Route, routes_to
from connector.messages import Peer
from connector.orders import Connected, PeerKey
from connector.transfer.agent import TransferAgent, TransferFailed, TransferState
from shared.contracts.kv_handshake import KvHandshake, KvRank

CONNECT_S_MAX = 5.0
PROBE_BYTES = 8


@dataclass(frozen=True, slots=True)
class Own:
    """Who reads: this rank, and the handshake of its engine with this rank alone."""

    reader: ReaderRank
    handshake: KvHandshake
    scratch: int
    """Address of PROBE_BYTES of registered cpu memory."""

    @property
    def memory(self) -> KvRank:
        """Where to."""
        return self.reader.memory


@dataclass(slots=True)
class Connection:
    """To one life of a peer: the agent's name of each of its ranks that is needed, and what to read of it."""

    handshake: KvHandshake
    since_s: float
    names: list[str] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
    probes: list[Any] = field(default_factory=list)
    """Small reads under way, which show that it works; none are left when it does."""


class Connections:
    """See the module."""

    def __init__(self, agent: TransferAgent, own: Own, clock: Callable[[], float]) -> None:
        self._agent = agent
        self._own = own
        self._clock = clock
        self._connections: dict[PeerKey, Connection] = {}
        self.connected: list[Connected] = []
        """What became of them; the owner takes it."""

    @property
    def probing(self) -> bool:
        """Whether some are not yet known to work."""
        return any(one.probes for one in self._connections.values())

    def of(self, key: PeerKey) -> Connection | None:
        """The connection to this life of a peer."""
        return self._connections.get(key)

    def connect(self, peer: Peer) -> None:
        """Begin to connect; ends with one Connected. A peer that is connected already stays so."""
        key = (peer.handshake.worker_id, peer.handshake.epoch)
        known = self._connections.get(key)
        if known is None:
            self._connect(key, peer.handshake)
        elif not known.probes:
            self.connected.append(Connected(key, 0.0))

    def _connect(self, key: PeerKey, handshake: KvHandshake) -> None:
        connection = Connection(handshake, self._clock())
        self._connections[key] = connection
        failure = why_not(self._own.handshake, handshake)
        try:
            if not failure:
                self._wire_up(connection)
        except TransferFailed as refused:
            failure = str(refused)
        if failure:
            self.lose(key, failure)

    def _wire_up(self, connection: Connection) -> None:
        peer = connection.handshake
        connection.routes = routes_to(self._own.reader, peer)
        for route in connection.routes:
            connection.names.append(self._agent.connect(peer.ranks[route.rank].agent))
        for name, route in zip(connection.names, connection.routes, strict=True):
            rank = peer.ranks[route.rank]
            there = np.array([[route.remote[0], PROBE_BYTES, rank.device_id]], dtype=np.uint64)
            here = np.array([[self._own.scratch, PROBE_BYTES, 0]], dtype=np.uint64)
            probe = self._agent.read(name, there, here, device="cpu", remote_device=rank.device)
            connection.probes.append(probe)

    def look(self) -> None:
        """At those that are not yet known to work."""
        for key in [key for key, one in self._connections.items() if one.probes]:
            connection = self._connections[key]
            states = {self._agent.state(probe) for probe in connection.probes}
            took_s = self._clock() - connection.since_s
            if TransferState.FAILED in states:
                self.lose(key, "the first read from it failed")
            elif TransferState.RUNNING not in states:
                self._give_back(connection)
                self.connected.append(Connected(key, took_s))
            elif took_s > CONNECT_S_MAX:
                self.lose(key, f"nothing could be read from it within {CONNECT_S_MAX} s")

    def lose(self, key: PeerKey, failure: str) -> None:
        """It works no more; harmless when it is gone already."""
        connection = self._connections.get(key)
        if connection is not None:
            self.forget(key)
            self.connected.append(Connected(key, self._clock() - connection.since_s, failure))

    def forget(self, key: PeerKey) -> None:
        """Disconnect: no byte of any read from there moves any more. Harmless when unknown."""
        connection = self._connections.pop(key, None)
        if connection is None:
            return
        for name in connection.names:
            self._agent.forget(name)
        self._give_back(connection)

    def close(self) -> None:
        """Disconnect from all."""
        for key in list(self._connections):
            self.forget(key)

    def _give_back(self, connection: Connection) -> None:
        for probe in connection.probes:
            self._agent.release(probe)
        connection.probes.clear()
