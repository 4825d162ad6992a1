"""Those who wait, in their order: for each model, priorities; in each priority, tenants by their fair share; of each
tenant, whoever must be served first.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heapreplace

from services.router.admission.fair_share import FairShare
from services.router.placement.placement import Placement, PlacementRequest
from shared.contracts.ids import WorkerId

NOT_NUMBERED = -1
ANYBODY = WorkerId("")
"""Wanted by who found all workers full."""
DRAIN_MEMORY_S = 20.0
"""How fast a line moves is remembered for so long."""
STRAIN_S_MIN = 0.02
"""Of waiting, lately, from which a line counts as strained."""
STRAINED_FOR_S = 300.0
"""After that it still does for so long: a prompt that takes an engine a minute should not meet the next rush."""
DRAIN_S_MIN = 0.5
"""Of waiting, before the speed of a line is believed."""
WORK_AT_FIRST_S = 0.05
"""A request's, before one of its model was placed."""
WORK_LEARNED = 0.05
"""How much the newest request says about the next one's work."""
LINES_IDLE_MAX = 64
"""Priorities of one model whose counters are kept while nobody waits there."""


class QueueEntry:
    """A request that wants to be placed, and what was found out about it while it waited. Seconds; instants on the
    monotonic clock.
    """

    __slots__ = (
        "arrived_at",
        "cost",
        "deadline",
        "ends_at",
        "hopeless_at",
        "line",
        "need",
        "number",
        "placed",
        "waiting",
        "wants",
        "work_s",
    )

    def __init__(self, need: PlacementRequest, arrived_at: float, ends_at: float = math.inf) -> None:
        self.need = need
        self.arrived_at = arrived_at
        self.ends_at = ends_at
        """When the request's whole budget is spent."""
        self.number = NOT_NUMBERED
        """Counts those that wait, to tell equals apart."""
        self.deadline = math.inf
        """When its first token should be there."""
        self.hopeless_at = math.inf
        """From then on it is too late to begin."""
        self.work_s = 0.0
        """Its prompt takes so long of an engine's time, as predicted."""
        self.cost = 0.0
        """What its tenant is to be charged."""
        self.line: PriorityQueue | None = None
        self.waiting = False
        self.wants = ANYBODY
        """The worker that it waits for, as was found the last time."""
        self.placed: Placement | None = None
        """Where it was sent."""

    def key(self) -> tuple[float, int]:
        """Its place among its tenant's requests."""
        return self.deadline, self.number


class PriorityQueue:
    """Those of one model and priority."""

    def __init__(self, lane: ModelQueue, priority: int, weights: Mapping[str, float]) -> None:
        self.lane = lane
        self.priority = priority
        self.share = FairShare(weights)
        self.tenants: dict[str, list[QueueEntry]] = {}
        self.count = 0
        self.work_s = 0.0
        self._work_of: dict[str, float] = {}
        """Of each tenant, in seconds."""

    def add(self, ticket: QueueEntry) -> None:
        """One more waits."""
        tenant = ticket.need.tenant
        insort(self.tenants.setdefault(tenant, []), ticket, key=QueueEntry.key)
        self.share.enter(tenant)
        self.count += 1
        self.work_s += ticket.work_s
        self._work_of[tenant] = self._work_of.get(tenant, 0.0) + ticket.work_s
        self.lane.added(ticket)
        ticket.waiting = True

    def remove(self, ticket: QueueEntry) -> None:
        """It waits no more."""
        tenant = ticket.need.tenant
        queue = self.tenants[tenant]
        del queue[bisect_left(queue, ticket.key(), key=QueueEntry.key)]
        self._work_of[tenant] -= ticket.work_s
        if not queue:
            del self.tenants[tenant], self._work_of[tenant]
        self.share.leave(tenant)
        self.count -= 1
        self.work_s = self.work_s - ticket.work_s if self.count else 0.0
        self.lane.removed(ticket)
        ticket.waiting = False

    def in_order(self) -> Iterator[QueueEntry]:
        """All of them, as they would be served if each were charged when its turn came."""
        share = self.share
        heads = [(share.served(tenant), queue[0].key(), tenant, 0) for tenant, queue in self.tenants.items()]
        heapify(heads)
        while heads:
            served, _key, tenant, position = heads[0]
            queue = self.tenants[tenant]
            ticket = queue[position]
            if position + 1 < len(queue):
                served += ticket.cost / share.weight(tenant)
                heapreplace(heads, (served, queue[position + 1].key(), tenant, position + 1))
            else:
                heappop(heads)
            yield ticket

    def greediest(self) -> str:
        """The tenant that waits with most, by its weight."""
        return max(self.tenants, key=lambda tenant: (self.load(tenant), tenant))

    def load(self, tenant: str, more: int = 0) -> float:
        """How much of the line a tenant has, by its weight; with so many more."""
        return (len(self.tenants.get(tenant, ())) + more) / self.share.weight(tenant)

    def load_mean(self) -> float:
        """What each tenant's would be if all had their share."""
        return self.count / self.share.weight_waiting() if self.count else 0.0

    def work_before_s(self, ticket: QueueEntry) -> float:
        """Of those that will be served before it: its tenant's own, and of others' as much as shares allow."""
        tenant = ticket.need.tenant
        queue, all_s = self.tenants.get(tenant, []), self._work_of.get(tenant, 0.0)
        later = queue[bisect_left(queue, ticket.key(), key=QueueEntry.key) :]
        own_s = all_s - sum([one.work_s for one in later])
        weight, weights = self.share.weight(tenant), self.share.weight_waiting()
        if not queue:
            weights += weight
        others_s = self.work_s - all_s
        return own_s + min(others_s, own_s * (weights / weight - 1.0))


class QueueThroughput:
    """How fast a model's lines move: engine seconds of work begun, for each second that somebody waited."""

    __slots__ = ("_at", "_begun_s", "_strained_until", "_waited_s", "_waiting")

    def __init__(self) -> None:
        self._at = 0.0
        self._begun_s = 0.0
        self._strained_until = 0.0
        self._waited_s = 0.0
        self._waiting = False

    def passed(self, now: float) -> None:
        """It is ``now``, and somebody waits."""
        took_s = max(0.0, now - self._at)
        kept = math.exp(-took_s / DRAIN_MEMORY_S)
        self._begun_s *= kept
        self._waited_s = self._waited_s * kept + (took_s if self._waiting else 0.0)
        self._at = now
        self._waiting = True
        if self._waited_s >= STRAIN_S_MIN:
            self._strained_until = now + STRAINED_FOR_S

    def calm_at(self, now: float) -> float:
        """When nobody will have waited for some minutes, if nobody does from now on."""
        return now + STRAINED_FOR_S if self._waiting else self._strained_until

    def rest(self) -> None:
        """From here on nobody waits."""
        self._waiting = False

    def begun(self, work_s: float) -> None:
        """So much of what waited is begun."""
        self._begun_s += work_s

    def wait_s(self, work_s: float, next_s: float) -> float | None:
        """How long so much work takes to be begun; None where nobody knows. ``next_s`` of work are about to be begun:
        a line that has not moved yet will.
        """
        return work_s * self._waited_s / (self._begun_s + next_s) if self._waited_s >= DRAIN_S_MIN else None


class ModelQueue:
    """All lines of one model, the most urgent first."""

    def __init__(self) -> None:
        self.lines: dict[int, PriorityQueue] = {}
        self.count = 0
        self.drain = QueueThroughput()
        self.late_again_at = -math.inf
        """Before that no prompt is begun that even an idle engine would be late with."""
        self.work_s = WORK_AT_FIRST_S
        """Of a request, lately."""
        self.looked_at = 0
        """How far down the order was looked the last time."""
        self.wanted: dict[WorkerId, int] = {}
        """How many wait for each worker."""

    def line(self, priority: int, weights: Mapping[str, float]) -> PriorityQueue:
        """The line of that priority."""
        line = self.lines.get(priority)
        if line is None:
            if len(self.lines) >= LINES_IDLE_MAX:
                self.lines = {one: line for one, line in self.lines.items() if line.count}
            self.lines[priority] = line = PriorityQueue(self, priority, weights)
            self.lines = dict(sorted(self.lines.items()))
        return line

    def in_order(self) -> Iterator[QueueEntry]:
        """Everyone who waits for this model."""
        for line in self.lines.values():
            if line.count:
                yield from line.in_order()

    def added(self, ticket: QueueEntry) -> None:
        """One more waits."""
        self.count += 1
        self.wanted[ticket.wants] = self.wanted.get(ticket.wants, 0) + 1

    def removed(self, ticket: QueueEntry) -> None:
        """One waits no more."""
        self.count -= 1
        self._want_no_more(ticket.wants)
        if not self.count:
            self.drain.rest()

    def want(self, ticket: QueueEntry, worker_id: WorkerId) -> None:
        """One that waits would wait for another worker now."""
        self._want_no_more(ticket.wants)
        ticket.wants = worker_id
        self.wanted[worker_id] = self.wanted.get(worker_id, 0) + 1

    def passable(self, *worker_ids: WorkerId) -> bool:
        """Whether nobody who waits wants any of these workers."""
        wanted = self.wanted
        return not wanted or not (ANYBODY in wanted or any(worker_id in wanted for worker_id in worker_ids))

    def _want_no_more(self, worker_id: WorkerId) -> None:
        left = self.wanted[worker_id] - 1
        if left:
            self.wanted[worker_id] = left
        else:
            del self.wanted[worker_id]

    def learn_work(self, work_s: float) -> None:
        """What a request that was placed takes."""
        self.work_s += WORK_LEARNED * (work_s - self.work_s)

    def wait_s(self, ticket: QueueEntry, line: PriorityQueue) -> float | None:
        """How long the ticket would wait in that line; None where nobody knows."""
        urgent_s = sum([other.work_s for priority, other in self.lines.items() if priority < line.priority])
        return self.drain.wait_s(urgent_s + line.work_before_s(ticket), self.work_s)
