"""Reads, part by part: begins them, follows them and says how each ended. One thread owns it and all of the agent.

A part that is cancelled, stalls or comes too late is given up, but reported only when it is over: from then on no byte
of it moves. What does not end by itself ends with the connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from connector.layout.routes import PART_BYTES, block_bytes_of, parts_of, spans_of
from connector.orders import Orders, PeerKey, Read, ReadPart, Results
from connector.transfer.agent import TransferAgent, TransferFailed, TransferState
from connector.worker.connections import Connection, Connections, Own

READ_S_MAX = 10.0
"""A part takes milliseconds; what takes longer is stuck."""
LET_GO_S_MAX = 2.0
"""For a part that is given up to end by itself, before the connection is cut."""
AT_ONCE_MAX = 4
"""Parts of one peer under way: the next is begun while one is in flight, where reads are not copied at once."""
PARTS_WAITING_MAX = 65_536


@dataclass(slots=True)
class _Part:
    read: Read
    first: int
    count: int
    bytes: int
    handles: list[Any] = field(default_factory=list)
    started_s: float = 0.0
    ended_s: float = 0.0
    """When it was given up, or seen to be over."""
    failure: str = ""


class Copier:
    """Moves what it is told to; ``advance`` is called until ``busy`` is false."""

    def __init__(
        self, agent: TransferAgent, own: Own, clock: Callable[[], float], part_bytes: int = PART_BYTES
    ) -> None:
        self._agent = agent
        self._own = own
        self._block_bytes = block_bytes_of(own.memory)
        self._clock = clock
        self._part_bytes = part_bytes
        self._connections = Connections(agent, own, clock)
        self._waiting: dict[PeerKey, deque[_Part]] = {}
        self._running: list[_Part] = []
        self._over: list[ReadPart] = []
        self._left: dict[int, int] = {}
        """Blocks of each read that are not final."""
        self.has_ended_a_read = False
        """Since results were last taken."""

    @property
    def busy(self) -> bool:
        """Whether anything is waiting or under way."""
        return bool(self._waiting or self._running or self._connections.probing)

    def submit(self, orders: Orders) -> None:
        """Take orders on. A peer forgotten and connected in one step is connected anew, and may be read at once."""
        for key in orders.forget:
            self._give_up([part for part in self._parts() if part.read.peer == key], "the peer is gone")
            self._connections.forget(key)
        for peer in orders.connect:
            self._connections.connect(peer)
        for read in orders.reads:
            self._take_on(read)
        for read_id in orders.cancel:
            self._give_up([part for part in self._parts() if part.read.read_id == read_id], "cancelled")

    def advance(self) -> bool:
        """Look at all that is under way, and begin what there is room for. Whether anything came of it."""
        before = len(self._over)
        self._connections.look()
        self._running = [part for part in self._running if not self._ended(part)]
        begun = [self._begin_one(key) for key in list(self._waiting)]
        return any(begun) or len(self._over) > before

    def take_results(self) -> Results:
        """What became final since the last call."""
        results = Results(self._connections.connected, self._over)
        self._connections.connected, self._over, self.has_ended_a_read = [], [], False
        return results

    def close(self) -> None:
        """Cut everything."""
        self._connections.close()
        self._agent.close()

    def _take_on(self, read: Read) -> None:
        self._left[read.read_id] = len(read.remote_blocks)
        for first, count in parts_of(len(read.remote_blocks), self._block_bytes, self._part_bytes):
            part = _Part(read, first, count, count * self._block_bytes)
            if sum(map(len, self._waiting.values())) >= PARTS_WAITING_MAX:
                part.failure = "too many reads wait"
                self._report(part)
            else:
                self._waiting.setdefault(read.peer, deque()).append(part)

    def _parts(self) -> Iterable[_Part]:
        return chain(self._running, *self._waiting.values())

    def _give_up(self, parts: list[_Part], why: str) -> None:
        for part in parts:
            part.failure = part.failure or why

    def _begin_one(self, key: PeerKey) -> bool:
        if sum(part.read.peer == key for part in self._running) >= AT_ONCE_MAX:
            return False
        part = self._waiting[key].popleft()
        if not self._waiting[key]:
            del self._waiting[key]
        part.started_s = self._clock()
        connection = self._connections.of(key)
        if connection is None:
            part.failure = part.failure or "not connected"
        elif not part.failure:
            self._begin(part, connection)
        if not self._ended(part):
            self._running.append(part)
        return True

    def _begin(self, part: _Part, connection: Connection) -> None:
        chosen = slice(part.first, part.first + part.count)
        remote, local = part.read.remote_blocks[chosen], part.read.local_blocks[chosen]
        if part.started_s >= part.read.until_s:
            part.failure = "the lease was over before the read began"
        elif min(remote) < 0 or max(remote) >= connection.handshake.blocks:
            part.failure = "the peer has no such blocks"
        else:
            try:
                self._post(part, connection, remote, local)
            except TransferFailed as refused:
                part.failure = str(refused)
                self._connections.lose(part.read.peer, part.failure)

    def _post(self, part: _Part, connection: Connection, remote: list[int], local: list[int]) -> None:
        own = self._own.memory
        for name, route in zip(connection.names, connection.routes, strict=True):
            rank = connection.handshake.ranks[route.rank]
            there, here = spans_of(route, remote, local)
            part.handles.append(self._agent.read(name, there, here, device=own.device, remote_device=rank.device))

    def _ended(self, part: _Part) -> bool:
        """Whether the part is over; if so it has been reported."""
        now = self._clock()
        if not part.failure and self._runs_on(part, now):
            return False
        part.ended_s = part.ended_s or now
        part.handles = [handle for handle in part.handles if not self._agent.release(handle)]
        if part.handles and now > part.ended_s + LET_GO_S_MAX:
            self._connections.lose(part.read.peer, f"cut, to end a read that was given up: {part.failure}")
            part.handles = [handle for handle in part.handles if not self._agent.release(handle)]
        if part.handles:
            return False
        self._report(part)
        return True

    def _runs_on(self, part: _Part, now: float) -> bool:
        states = {self._agent.state(handle) for handle in part.handles}
        if TransferState.FAILED in states:
            part.failure = "the read failed"
            self._connections.lose(part.read.peer, part.failure)
        elif now > part.read.until_s:
            part.failure = "the lease was over before the read was"
        elif now > part.started_s + READ_S_MAX:
            part.failure = f"not read within {READ_S_MAX} s"
        return not part.failure and TransferState.RUNNING in states

    def _report(self, part: _Part) -> None:
        ended_s = part.ended_s or self._clock()
        moved = 0 if part.failure else part.bytes
        self._left[part.read.read_id] -= part.count
        if not self._left[part.read.read_id]:
            del self._left[part.read.read_id]
            self.has_ended_a_read = True
        self._over.append(
            ReadPart(part.read.read_id, part.first, part.count, moved, part.started_s or ended_s, ended_s, part.failure)
        )
