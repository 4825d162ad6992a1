"""The transfer thread: owns the transfer agent, so that connecting and reading take no time of the model's thread.

Over shared memory the thread that begins a read copies it, which takes milliseconds. So the model's thread must not
begin reads, and the transfer thread should not share its core. Without work the thread sleeps on a condition.

The copier carries out reads in parts: begins each part, polls it and reports its end. A part that is cancelled, stalls
or is late is given up, but reported only when no byte of it can move any more: after the report the engine reuses the
blocks, and a late write would corrupt another request's KV. NIXL cannot stop a running transfer, so a part that does
not end by itself is ended by cutting the connection.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from connector.layout.routes import block_bytes_of, parts_of, spans_of
from connector.messages import BlocksDigested, Orders, PeerKey, Read, ReadPart, Results
from connector.transfer.agent import TransferAgent, TransferFailed, TransferState, failing
from connector.transfer.threads import allow_cores
from connector.worker.connections import Connection, Connections, Own
from connector.worker.digests import ReadMemory, digested, read_cpu_memory
from connector.worker.notices import LOOK_S, Notices

READ_S_MAX = 10.0
"""Maximum duration of a part, which normally takes milliseconds."""
SELF_END_S_MAX = 2.0
"""A part that is given up has so long to end by itself before the connection is cut."""
PARTS_PER_PEER_MAX = 4
"""Parts per peer under way. More than one keeps a network busy; over shared memory ``read`` copies before it returns.
"""
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
    """Instant at which it was given up or had ended."""
    failure: str = ""


class Copier:
    """Carries out orders. Call ``advance`` until ``busy`` is false."""

    def __init__(
        self,
        agent: TransferAgent,
        own: Own,
        clock: Callable[[], float],
        read_memory: ReadMemory = read_cpu_memory,
        notices: Notices | None = None,
    ) -> None:
        """``read_memory``: reads the engine's own KV memory. ``notices``: only the engine's first rank has them."""
        self._agent = agent
        self._own = own
        self._block_bytes = [block_bytes_of(own.memory, group) for group in range(len(own.handshake.groups))]
        self._clock = clock
        self._read_memory = read_memory
        self._notices = notices
        self._connections = Connections(agent, own, clock)
        self._waiting: dict[PeerKey, deque[_Part]] = {}
        self._running: list[_Part] = []
        self._ended_parts: list[ReadPart] = []
        self._digested: list[BlocksDigested] = []
        self._unreported: dict[int, int] = {}
        """Blocks of each read that are not reported yet."""
        self.has_ended_a_read = False
        """Whether a read has ended since ``take_results``."""

    @property
    def busy(self) -> bool:
        """Whether anything waits or is under way."""
        return bool(self._waiting or self._running or self._connections.busy)

    @property
    def look_s(self) -> float | None:
        """Pause between two looks for notices; None: it need not look."""
        return LOOK_S if self._notices is not None and self._notices.is_listening else None

    def submit(self, orders: Orders) -> None:
        """Accept orders. A peer may be forgotten, connected again and read in the same step."""
        if self._notices is not None:
            for notice in orders.notices:
                self._connections.notify(notice.peer, notice.packed)
            if orders.listens is not None:
                self._notices.listen(wanted=orders.listens)
        for key in orders.forget:
            self._give_up([part for part in self._parts() if part.read.peer == key], "the peer is gone")
            self._connections.forget(key)
        for peer in orders.connect:
            self._connections.connect(peer)
        for read in orders.reads:
            self._enqueue(read)
        for read_id in orders.cancel:
            self._give_up([part for part in self._parts() if part.read.read_id == read_id], "cancelled")
        self._digested += [digested(order, self._own.reader, self._read_memory) for order in orders.digests]

    def advance(self) -> bool:
        """Check everything under way and begin what the limits allow. Returns whether anything began or ended."""
        before = len(self._ended_parts)
        if self._notices is not None:
            self._notices.look()
        self._connections.check()
        self._running = [part for part in self._running if not self._has_ended(part)]
        begun = [self._begin_one(key) for key in list(self._waiting)]
        return any(begun) or len(self._ended_parts) > before

    def take_results(self) -> Results:
        """Results since the last call."""
        results = Results(self._connections.connected, self._ended_parts, self._digested)
        self._connections.connected, self._ended_parts, self.has_ended_a_read = [], [], False
        self._digested = []
        return results

    def close(self) -> None:
        """Disconnect from all peers and close the agent."""
        self._connections.close()
        if self._notices is not None:
            self._notices.close()
        self._agent.close()

    def _enqueue(self, read: Read) -> None:
        self._unreported[read.read_id] = len(read.remote_blocks)
        for first, count in parts_of(len(read.remote_blocks), read.part_blocks):
            part = _Part(read, first, count, count * self._block_bytes[read.group])
            if sum(map(len, self._waiting.values())) >= PARTS_WAITING_MAX:
                part.failure = "too many reads are waiting"
                self._report(part)
            else:
                self._waiting.setdefault(read.peer, deque()).append(part)

    def _parts(self) -> Iterable[_Part]:
        return chain(self._running, *self._waiting.values())

    def _give_up(self, parts: list[_Part], why: str) -> None:
        for part in parts:
            part.failure = part.failure or why

    def _begin_one(self, key: PeerKey) -> bool:
        if sum(part.read.peer == key for part in self._running) >= PARTS_PER_PEER_MAX:
            return False
        connection = self._connections.of(key)
        part = self._waiting[key][0]
        if connection is not None and connection.opening and self._may_wait(part):
            return False
        self._waiting[key].popleft()
        if not self._waiting[key]:
            del self._waiting[key]
        part.started_s = self._clock()
        if connection is None:
            part.failure = part.failure or "not connected"
        elif not part.failure:
            self._begin(part, connection)
        if not self._has_ended(part):
            self._running.append(part)
        return True

    def _may_wait(self, part: _Part) -> bool:
        """For the connection to be opened."""
        return not part.failure and self._clock() < part.read.until_s

    def _begin(self, part: _Part, connection: Connection) -> None:
        chosen = slice(part.first, part.first + part.count)
        remote, local = part.read.remote_blocks[chosen], part.read.local_blocks[chosen]
        if part.started_s >= part.read.until_s:
            part.failure = "the lease ended before the read began"
        elif min(remote) < 0 or max(remote) >= connection.handshake.blocks:
            part.failure = "the peer has no such blocks"
        else:
            try:
                with failing("reading"):
                    self._post(part, connection, remote, local)
            except TransferFailed as refused:
                part.failure = str(refused)
                self._connections.lose(part.read.peer, part.failure)

    def _post(self, part: _Part, connection: Connection, remote: list[int], local: list[int]) -> None:
        own = self._own.memory
        for route in connection.routes:
            if route.group != part.read.group:
                continue
            name, rank = connection.names[route.rank], connection.handshake.ranks[route.rank]
            there, here = spans_of(route, remote, local)
            part.handles.append(self._agent.read(name, there, here, device=own.device, remote_device=rank.device))

    def _has_ended(self, part: _Part) -> bool:
        """Whether the part is over, and so reported."""
        now = self._clock()
        if not part.failure and self._is_running(part, now):
            return False
        part.ended_s = part.ended_s or now
        part.handles = [handle for handle in part.handles if not self._agent.release(handle)]
        if part.handles and now > part.ended_s + SELF_END_S_MAX:
            self._connections.lose(part.read.peer, f"disconnected to end a read that was given up: {part.failure}")
            part.handles = [handle for handle in part.handles if not self._agent.release(handle)]
        if part.handles:
            return False
        self._report(part)
        return True

    def _is_running(self, part: _Part, now: float) -> bool:
        states = {self._agent.state(handle) for handle in part.handles}
        if TransferState.FAILED in states:
            part.failure = "the read failed"
            self._connections.lose(part.read.peer, part.failure)
        elif now > part.read.until_s:
            part.failure = "the lease ended before the read"
        elif now > part.started_s + READ_S_MAX:
            part.failure = f"not read within {READ_S_MAX} s"
        return not part.failure and TransferState.RUNNING in states

    def _report(self, part: _Part) -> None:
        ended_s = part.ended_s or self._clock()
        moved = 0 if part.failure else part.bytes
        self._unreported[part.read.read_id] -= part.count
        if not self._unreported[part.read.read_id]:
            del self._unreported[part.read.read_id]
            self.has_ended_a_read = True
        self._ended_parts.append(
            ReadPart(part.read.read_id, part.first, part.count, moved, part.started_s or ended_s, ended_s, part.failure)
        )


POLL_S = 0.000_1
"""Pause between checks of what is under way."""
REPORT_S_MAX = 0.005
"""Interval of reports while one read follows another. The scheduler wakes for each report, often on the core that
copies, and can do nothing with a part of a read."""
CLOSE_S_MAX = 5.0
ORDERS_WAITING_MAX = 4096
"""Steps whose orders may wait. The model's thread then blocks, because a lost order would leave requests waiting."""
BEHIND_S_MAX = 5.0
"""Maximum duration of that block; then ``submit`` raises and the engine ends. An engine that cannot move KV must not
look healthy.
"""


class TransferThread:
    """Runs a Copier on a thread of its own."""

    def __init__(self, make_copier: Callable[[], Copier], cores: Sequence[int] = ()) -> None:
        self._make_copier = make_copier
        self._cores = cores
        self._wake = threading.Condition()
        self._orders: deque[Orders] = deque()
        self._results = Results()
        self._reported_at = 0.0
        self._wakers: list[Callable[[], None]] = []
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kv-transfers", daemon=True)
        self._thread.start()

    def submit(self, orders: Orders) -> None:
        """Queue orders; returns at once. Raises RuntimeError if the thread has failed or does not take orders."""
        if not orders:
            return
        with self._wake:
            has_slot = self._wake.wait_for(
                lambda: len(self._orders) < ORDERS_WAITING_MAX or self._failure, BEHIND_S_MAX
            )
            self._raise_if_failed()
            if not has_slot:
                raise RuntimeError(f"the transfer thread has taken no orders for {BEHIND_S_MAX} s")
            self._orders.append(orders)
            self._wake.notify_all()

    def wake_on_results(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` on this thread after each report."""
        self._wakers.append(wake)

    def take_results(self, wait_s: float = 0.0) -> Results:
        """Results since the last call. If there are none, wait for at most ``wait_s``."""
        if not wait_s and not self._results and self._failure is None:
            return Results()  # Without the lock: what comes just now would come after it, too, and wakes the engine.
        with self._wake:
            if wait_s:
                self._wake.wait_for(lambda: self._results or self._failure is not None, wait_s)
            self._raise_if_failed()
            results, self._results = self._results, Results()
            return results

    def close(self) -> None:
        """Cut what is under way and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(CLOSE_S_MAX)

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the transfer thread failed") from self._failure

    def _run(self) -> None:
        try:
            allow_cores(self._cores)
            copier = self._make_copier()
            while not self._closing:
                self._run_once(copier)
            copier.close()
        except BaseException as bug:
            with self._wake:
                self._failure = bug
                self._wake.notify_all()

    def _run_once(self, copier: Copier) -> None:
        with self._wake:
            if not copier.busy:
                self._wake.wait_for(lambda: self._orders or self._closing, copier.look_s)
            orders = list(self._orders)
            self._orders.clear()
            if orders:
                self._wake.notify_all()
        for one in orders:
            copier.submit(one)
        has_progress = copier.advance() and copier.busy
        is_report_due = copier.has_ended_a_read and time.monotonic() > self._reported_at + REPORT_S_MAX
        if not has_progress or is_report_due:
            self._report(copier.take_results())
        if copier.busy and not has_progress:
            time.sleep(POLL_S)

    def _report(self, results: Results) -> None:
        self._reported_at = time.monotonic()
        if results:
            with self._wake:
                self._results.connected.extend(results.connected)
                self._results.parts.extend(results.parts)
                self._results.digested.extend(results.digested)
                self._wake.notify_all()
            for wake in self._wakers:
                wake()
