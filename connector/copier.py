"""Reads, part by part: begins them, follows them and says how each ended. One thread owns it and all of the agent.

A part that fails, stalls or comes too late is given up, and reported only when its handles are back: from then on no
byte of it moves. What cannot be stopped otherwise ends with the connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from connector.core.calls import Peer
from connector.core.compatibility import why_not
from connector.core.orders import Connected, PeerKey, Read, ReadPart, Results
from connector.core.read_plan import Addresses, Reader, Route, block_bytes_of, parts_of, routes_to, spans_of
from connector.transfer_port import Spans, TransferAgent, TransferFailed, TransferState
from shared.contracts.kv_exchange import KvHandshake, KvRank

CONNECT_S_MAX = 5.0
READ_S_MAX = 10.0
"""A part takes milliseconds; what takes longer is stuck."""
LET_GO_S_MAX = 1.0
"""For a part that is given up to let go of its handles, before the connection is cut."""
AT_ONCE_MAX = 4
"""Parts under way at the same time: the next is begun while one is in flight, where reads are not copied at once."""
PARTS_WAITING_MAX = 65_536
PROBE_BYTES = 8


@dataclass(frozen=True, slots=True)
class Own:
    """Who reads: this rank, and the handshake of its engine with this rank alone."""

    reader: Reader
    handshake: KvHandshake
    scratch: int
    """Address of PROBE_BYTES of registered cpu memory."""

    @property
    def memory(self) -> KvRank:
        """Where to."""
        return self.reader.memory


@dataclass(slots=True)
class _Connection:
    """To one life of a peer: the agent's name of each rank that is needed, and what to read of it."""

    handshake: KvHandshake
    since_s: float
    names: list[str] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
    probes: list[Any] = field(default_factory=list)
    """Small reads that show that the wire works; none are left when it does."""


@dataclass(slots=True)
class _Part:
    read: Read
    first: int
    count: int
    bytes: int
    handles: list[Any] = field(default_factory=list)
    started_s: float = 0.0
    ended_s: float = 0.0
    failure: str = ""
    cut: bool = False
    """The connection was ended to make it let go."""


class Copier:
    """Moves what it is told to; ``advance`` is called until ``busy`` is false."""

    def __init__(self, agent: TransferAgent, own: Own, clock: Callable[[], float]) -> None:
        self._agent = agent
        self._own = own
        self._clock = clock
        self._connections: dict[PeerKey, _Connection] = {}
        self._waiting: deque[_Part] = deque()
        self._running: list[_Part] = []
        self._results = Results()

    @property
    def busy(self) -> bool:
        """Whether anything is waiting or under way."""
        return bool(self._waiting or self._running or any(one.probes for one in self._connections.values()))

    def take_results(self) -> Results:
        """What became final since the last call."""
        results, self._results = self._results, Results()
        return results

    def connect(self, peer: Peer) -> None:
        """Begin to connect; a peer that is connected already stays so. Ends with one Connected."""
        key = (peer.handshake.worker_id, peer.handshake.epoch)
        known = self._connections.get(key)
        if known is not None:
            if not known.probes:
                self._results.connected.append(Connected(key, 0.0))
            return
        connection = _Connection(peer.handshake, self._clock())
        self._connections[key] = connection
        failure = why_not(self._own.handshake, peer.handshake)
        try:
            if not failure:
                self._wire_up(connection)
        except TransferFailed as refused:
            failure = str(refused)
        if failure:
            self._give_connection_up(key, failure)

    def forget(self, key: PeerKey) -> None:
        """Disconnect; what is being read from it fails."""
        for part in [*self._waiting, *self._running]:
            if part.read.peer == key:
                part.failure = part.failure or "the peer is gone"
                part.cut = True
        connection = self._connections.pop(key, None)
        if connection is not None:
            self._cut(connection)

    def read(self, read: Read) -> None:
        """Take a read on. Ends with one ReadPart for each part."""
        block_bytes = block_bytes_of(self._own.memory)
        for first, count in parts_of(len(read.remote_blocks), block_bytes):
            part = _Part(read, first, count, count * block_bytes)
            if len(self._waiting) >= PARTS_WAITING_MAX:
                self._end(part, "too many reads wait")
            else:
                self._waiting.append(part)

    def cancel(self, read_id: int) -> None:
        """Nobody wants it any more. Its parts are still reported."""
        for part in [*self._waiting, *self._running]:
            if part.read.read_id == read_id:
                part.failure = part.failure or "cancelled"

    def advance(self) -> None:
        """Look at all that is under way, and begin what there is room for."""
        for key in [key for key, one in self._connections.items() if one.probes]:
            self._look_at_probes(key)
        self._running = [part for part in self._running if not self._ended(part)]
        while self._waiting and len(self._running) < AT_ONCE_MAX:
            part = self._waiting.popleft()
            self._begin(part)
            if not self._ended(part):
                self._running.append(part)

    def close(self) -> None:
        """Cut everything."""
        for key in list(self._connections):
            self.forget(key)
        self.advance()
        self._agent.close()

    # Connections

    def _wire_up(self, connection: _Connection) -> None:
        peer = connection.handshake
        connection.routes = routes_to(self._own.reader, peer)
        for route in connection.routes:
            connection.names.append(self._agent.connect(peer.ranks[route.rank].agent))
        for name, route in zip(connection.names, connection.routes, strict=True):
            there = np.array([[route.remote[0], PROBE_BYTES]], dtype=np.uint64)
            here = np.array([[self._own.scratch, PROBE_BYTES]], dtype=np.uint64)
            rank = peer.ranks[route.rank]
            probe = self._agent.read(
                name, on_device(there, rank.device_id), on_device(here, 0), device="cpu", remote_device=rank.device
            )
            connection.probes.append(probe)

    def _look_at_probes(self, key: PeerKey) -> None:
        connection = self._connections[key]
        states = [self._agent.state(probe) for probe in connection.probes]
        took_s = self._clock() - connection.since_s
        if TransferState.FAILED in states:
            self._give_connection_up(key, "the first read from it failed")
        elif TransferState.RUNNING not in states:
            for probe in connection.probes:
                self._agent.release(probe)
            connection.probes.clear()
            self._results.connected.append(Connected(key, took_s))
        elif took_s > CONNECT_S_MAX:
            self._give_connection_up(key, f"nothing could be read from it within {CONNECT_S_MAX} s")

    def _give_connection_up(self, key: PeerKey, failure: str) -> None:
        took_s = self._clock() - self._connections[key].since_s
        self.forget(key)
        self._results.connected.append(Connected(key, took_s, failure))

    def _cut(self, connection: _Connection) -> None:
        for probe in connection.probes:
            self._agent.release(probe)
        connection.probes.clear()
        for name in connection.names:
            self._agent.forget(name)

    # Parts

    def _begin(self, part: _Part) -> None:
        part.started_s = self._clock()
        connection = self._connections.get(part.read.peer)
        if part.failure:
            return
        if connection is None:
            part.failure = "not connected"
        elif part.started_s >= part.read.until_s:
            part.failure = "the lease was over before the read began"
        elif not self._within(part, connection.handshake.blocks):
            part.failure = "the grant names blocks that the peer does not have"
        else:
            self._post(part, connection)

    def _within(self, part: _Part, blocks: int) -> bool:
        remote = part.read.remote_blocks[part.first : part.first + part.count]
        return min(remote) >= 0 and max(remote) < blocks

    def _post(self, part: _Part, connection: _Connection) -> None:
        chosen = slice(part.first, part.first + part.count)
        own = self._own.memory
        for name, route in zip(connection.names, connection.routes, strict=True):
            there, here = spans_of(route, part.read.remote_blocks[chosen], part.read.local_blocks[chosen])
            rank = connection.handshake.ranks[route.rank]
            remote, local = on_device(there, rank.device_id), on_device(here, own.device_id)
            try:
                handle = self._agent.read(name, remote, local, device=own.device, remote_device=rank.device)
            except TransferFailed as refused:
                part.failure = str(refused)
                return
            part.handles.append(handle)

    def _ended(self, part: _Part) -> bool:
        """Whether the part is over; if so it has been reported."""
        now = self._clock()
        if not part.failure:
            states = [self._agent.state(handle) for handle in part.handles]
            if TransferState.FAILED in states:
                part.failure = "the read failed"
            elif now > part.read.until_s:
                part.failure = "the lease was over before the read was"
            elif now > part.started_s + READ_S_MAX:
                part.failure = f"not read within {READ_S_MAX} s"
            elif TransferState.RUNNING in states:
                return False
        part.ended_s = part.ended_s or now
        part.handles = [handle for handle in part.handles if not self._agent.release(handle)]
        if part.handles and not part.cut and now > part.ended_s + LET_GO_S_MAX:
            self.forget(part.read.peer)
        if part.handles:
            return False
        self._end(part, part.failure)
        return True

    def _end(self, part: _Part, failure: str) -> None:
        moved = 0 if failure else part.bytes
        ended_s = self._clock()
        self._results.parts.append(
            ReadPart(part.read.read_id, part.first, part.count, moved, part.started_s or ended_s, ended_s, failure)
        )


def on_device(pairs: Addresses, device_id: int) -> Spans:
    """Address and length, with the device they are on."""
    return np.column_stack((pairs, np.full(len(pairs), device_id, dtype=np.uint64)))
