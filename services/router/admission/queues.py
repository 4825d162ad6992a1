"""The order of waiting requests: by model, then by priority, then by the tenants' fair shares, then by deadline; and a
scheduling pass over it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from typing import Final

from services.router.admission.fair_share import FairShare
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId

NOT_NUMBERED: Final = -1
ANY_WORKER: Final = WorkerId("")
"""Sentinel: the request waits for any worker, because all are full."""
THROUGHPUT_MEMORY_S: Final = 20.0
"""Time constant with which a queue's throughput is forgotten."""
LOAD_MEMORY_S: Final = 60.0
"""Time constant with which a worker's prefill work is forgotten."""
LOAD_SEEN_S_MIN: Final = 10.0
"""Shortest time over which a worker's prefill work is averaged."""
LOAD_FORGOTTEN_S: Final = 0.001
"""Prefill work below which a worker is forgotten."""
WAITED_S_MIN: Final = 0.5
"""A queue's throughput is an estimate only after requests waited for this long."""
WORK_AT_FIRST_S: Final = 0.05
"""Assumed work of a request, before one of its model was placed."""
WORK_LEARNED: Final = 0.05
"""Weight of the newest request in the mean work of a model's requests."""
PRIORITIES_IDLE_MAX: Final = 64
"""Priorities of one model whose tenant counters are kept while none of their requests waits."""


class QueueEntry:
    """A request from its arrival until it ends, as admission sees it. Seconds; instants on the monotonic clock."""

    def __init__(self, request: PlacementRequest, arrived_at: float, ends_at: float = math.inf) -> None:
        self.request = request
        self.arrived_at = arrived_at
        self.ends_at = ends_at
        """When the request's whole time is used up."""
        self.number = NOT_NUMBERED
        """Order of arrival in the queue, to order entries of equal deadline."""
        self.deadline = math.inf
        """When its first token should be there."""
        self.expires_at = math.inf
        """When it becomes too late to begin."""
        self.work_s = 0.0
        """Predicted engine time of its prompt."""
        self.cost = 0.0
        """What its tenant is charged."""
        self.queue: PriorityQueue | None = None
        self.waiting = False
        self.awaits = ANY_WORKER
        """The worker that it waits for, according to the last scheduling pass."""
        self.gap_worker = ANY_WORKER
        """The worker for the end of whose gap it waited last; ``ANY_WORKER``: it waited for none."""
        self.gap_step_s = 0.0
        """A step of that worker with as many prompt tokens as it computes at once."""
        self.placement: Placement | None = None
        self.expected: Placement | None = None
        """Where it would have gone on arrival, had it not to wait; None: nowhere, or it did not wait."""

    def key(self) -> tuple[float, int]:
        """Its place among its tenant's requests."""
        return self.deadline, self.number


class PriorityQueue:
    """The waiting requests of one model and priority."""

    def __init__(self, model_queue: ModelQueue, priority: int, weights: Mapping[str, float]) -> None:
        self.model_queue = model_queue
        self.priority = priority
        self.share = FairShare(weights)
        self.tenants: dict[str, list[QueueEntry]] = {}
        self.count = 0
        self.work_s = 0.0
        self._work_of: dict[str, float] = {}
        """Seconds of waiting work by tenant."""

    def add(self, entry: QueueEntry) -> None:
        tenant = entry.request.tenant
        insort(self.tenants.setdefault(tenant, []), entry, key=QueueEntry.key)
        self.share.enter(tenant)
        self.count += 1
        self.work_s += entry.work_s
        self._work_of[tenant] = self._work_of.get(tenant, 0.0) + entry.work_s
        self.model_queue.added(entry)
        entry.waiting = True

    def remove(self, entry: QueueEntry) -> None:
        tenant = entry.request.tenant
        entries = self.tenants[tenant]
        del entries[bisect_left(entries, entry.key(), key=QueueEntry.key)]
        self._work_of[tenant] -= entry.work_s
        if not entries:
            del self.tenants[tenant], self._work_of[tenant]
        self.share.leave(tenant)
        self.count -= 1
        self.work_s = self.work_s - entry.work_s if self.count else 0.0
        self.model_queue.removed(entry)
        entry.waiting = False

    def in_order(self) -> Iterator[QueueEntry]:
        """All entries in the order in which they would be served if each were charged as it begins."""
        share = self.share
        heads = [(share.served(tenant), entries[0].key(), tenant, 0) for tenant, entries in self.tenants.items()]
        heapify(heads)
        while heads:
            served, _key, tenant, position = heads[0]
            entries = self.tenants[tenant]
            entry = entries[position]
            if position + 1 < len(entries):
                served += entry.cost / share.weight(tenant)
                heapreplace(heads, (served, entries[position + 1].key(), tenant, position + 1))
            else:
                heappop(heads)
            yield entry

    def greediest(self) -> str:
        """The tenant with the most waiting requests, relative to its weight."""
        return max(self.tenants, key=lambda tenant: (self.load(tenant), tenant))

    def load(self, tenant: str, more: int = 0) -> float:
        """The tenant's number of waiting requests, plus ``more``, divided by its weight."""
        return (len(self.tenants.get(tenant, ())) + more) / self.share.weight(tenant)

    def load_mean(self) -> float:
        """The load of each tenant if all had their fair share of the queue."""
        return self.count / self.share.weight_waiting() if self.count else 0.0

    def work_before_s(self, entry: QueueEntry) -> float:
        """Work that is served before the entry: its tenant's own, and of other tenants as much as shares allow."""
        tenant = entry.request.tenant
        entries, all_s = self.tenants.get(tenant, []), self._work_of.get(tenant, 0.0)
        later = entries[bisect_left(entries, entry.key(), key=QueueEntry.key) :]
        own_s = all_s - sum([one.work_s for one in later])
        weight, weights = self.share.weight(tenant), self.share.weight_waiting()
        if not entries:
            weights += weight
        others_s = self.work_s - all_s
        return own_s + min(others_s, own_s * (weights / weight - 1.0))


class QueueThroughput:
    """How fast a model's queue moves: seconds of engine work begun in each second in which requests waited."""

    def __init__(self) -> None:
        self._at = 0.0
        self._begun_s = 0.0
        self._waited_s = 0.0
        self._waiting = False

    def advance(self, now: float) -> None:
        """Account for the time until ``now``. From here on requests wait."""
        took_s = max(0.0, now - self._at)
        kept = math.exp(-took_s / THROUGHPUT_MEMORY_S)
        self._begun_s *= kept
        self._waited_s = self._waited_s * kept + (took_s if self._waiting else 0.0)
        self._at = now
        self._waiting = True

    def emptied(self) -> None:
        """From here on no request waits."""
        self._waiting = False

    def begun(self, work_s: float) -> None:
        """A request that waited has begun."""
        self._begun_s += work_s

    def wait_s(self, work_s: float, next_s: float) -> float | None:
        """How long it takes until so much work is begun; None without an estimate. ``next_s`` of work will begin next:
        it counts as begun, so that a queue that has not moved yet has a finite wait.
        """
        return work_s * self._waited_s / (self._begun_s + next_s) if self._waited_s >= WAITED_S_MIN else None


class PrefillLoads:
    """Seconds of prefill work that began on each worker in each second: moving averages over ``LOAD_MEMORY_S``."""

    def __init__(self) -> None:
        self._loads: dict[WorkerId, PrefillLoad] = {}

    def begun(self, worker_id: WorkerId, work_s: float, now: float) -> None:
        """A request has begun on this worker."""
        load = self._loads.get(worker_id)
        if load is None:
            self._loads = {one: kept for one, kept in self._loads.items() if kept.left_s(now) > LOAD_FORGOTTEN_S}
            load = self._loads[worker_id] = PrefillLoad(now)
        load.add(work_s, now)

    def falls_to(self, worker_id: WorkerId, share: float, now: float) -> float:
        """When a worker's average is at most ``share``, if nothing more begins there; ``now`` if it is already."""
        load = self._loads.get(worker_id)
        average = load.average(now) if load is not None else 0.0
        return now if average <= share else now + LOAD_MEMORY_S * math.log(average / share)


class PrefillLoad:
    """Prefill work queued at one worker."""

    def __init__(self, now: float) -> None:
        self._at = self._since = now
        self._begun_s = 0.0

    def add(self, work_s: float, now: float) -> None:
        self._begun_s = self.left_s(now) + work_s
        self._at = now

    def left_s(self, now: float) -> float:
        """The work that is not forgotten yet."""
        return self._begun_s * math.exp((self._at - now) / LOAD_MEMORY_S)

    def average(self, now: float) -> float:
        """Seconds of work for each second."""
        seen_s = max(LOAD_SEEN_S_MIN, now - self._since)
        return self.left_s(now) / (LOAD_MEMORY_S * (1.0 - math.exp(-seen_s / LOAD_MEMORY_S)))


class ModelQueue:
    """The waiting requests of one model, most urgent priority first."""

    def __init__(self) -> None:
        self.priorities: dict[int, PriorityQueue] = {}
        self.count = 0
        self.throughput = QueueThroughput()
        self.late_allowed_at = -math.inf
        """When a prompt may begin that even an idle engine would complete too late."""
        self.work_s = WORK_AT_FIRST_S
        """Mean work of a request, lately."""
        self.turn = 0
        """Position of the request that the next scheduling pass places even if what it waits for is reserved."""
        self._awaited: dict[WorkerId, int] = {}
        """How many requests wait for each worker."""

    def of_priority(self, priority: int, weights: Mapping[str, float]) -> PriorityQueue:
        queue = self.priorities.get(priority)
        if queue is None:
            if len(self.priorities) >= PRIORITIES_IDLE_MAX:
                self.priorities = {one: queue for one, queue in self.priorities.items() if queue.count}
            self.priorities[priority] = queue = PriorityQueue(self, priority, weights)
            self.priorities = dict(sorted(self.priorities.items()))
        return queue

    def in_order(self) -> Iterator[QueueEntry]:
        for queue in self.priorities.values():
            if queue.count:
                yield from queue.in_order()

    def added(self, entry: QueueEntry) -> None:
        self.count += 1
        self._awaited[entry.awaits] = self._awaited.get(entry.awaits, 0) + 1

    def removed(self, entry: QueueEntry) -> None:
        self.count -= 1
        self._release(entry.awaits)
        if not self.count:
            self.throughput.emptied()

    def set_awaited(self, entry: QueueEntry, worker_id: WorkerId) -> None:
        """A waiting entry would now have to wait for another worker."""
        self._release(entry.awaits)
        entry.awaits = worker_id
        self._awaited[worker_id] = self._awaited.get(worker_id, 0) + 1

    def may_overtake(self, *worker_ids: WorkerId) -> bool:
        """Whether a new request may begin on these workers: no waiting request waits for one of them."""
        awaited = self._awaited
        return not awaited or not (ANY_WORKER in awaited or any(worker_id in awaited for worker_id in worker_ids))

    def _release(self, worker_id: WorkerId) -> None:
        left = self._awaited[worker_id] - 1
        if left:
            self._awaited[worker_id] = left
        else:
            del self._awaited[worker_id]

    def learn_work(self, work_s: float) -> None:
        """The work of a request that was placed."""
        self.work_s += WORK_LEARNED * (work_s - self.work_s)

    def wait_s(self, entry: QueueEntry, queue: PriorityQueue) -> float | None:
        """How long the entry would wait in that queue; None without an estimate."""
        urgent_s = sum([other.work_s for priority, other in self.priorities.items() if priority < queue.priority])
        return self.throughput.wait_s(urgent_s + queue.work_before_s(entry), self.work_s)


HELD_MAX: Final = 4
"""A pass ends after this many requests were placed anew and still have to wait. It leaves out those that wait, since
they were placed last, for a worker that an earlier one of the pass waits for, but for one in turn: so every request is
placed again in time.
"""
BEGUN_MAX: Final = 64
"""Requests that begin in one pass. A placement takes a good tenth of a millisecond, so that more of them would hold up
the streams that the router relays.
"""

Place = Callable[[PlacementRequest, float], Placement | Rejection]
Obstacle = Callable[[QueueEntry, Placement, float, float], WorkerId | None]
GivenWork = Mapping[WorkerId, float]
"""Seconds of work by worker that their reports do not show yet."""
NONE_GIVEN: Final[GivenWork] = {}
Elsewhere = Callable[[QueueEntry, Placement, float, GivenWork], Placement | None]


class SchedulingPass:
    """Which waiting requests of a model begin now, and on which workers. ``run`` fills ``decided``. In the queue it
    changes only which workers the requests wait for.
    """

    def __init__(self, model_queue: ModelQueue, place: Place, obstacle: Obstacle, elsewhere: Elsewhere) -> None:
        self._model_queue = model_queue
        self._place = place
        self._obstacle = obstacle
        self._elsewhere = elsewhere
        self._reserved: set[WorkerId] = set()
        """Workers that an earlier request of the order waits for: later ones must not take them."""
        self._tries_elsewhere = True
        """Whether requests are tried on other workers: until the first that cannot begin there, as each try costs as
        much as a placement.
        """
        self._given_s: dict[WorkerId, float] = {}
        """Work that workers got in this pass, which their reports do not show yet. Several small prompts may begin on
        one worker in one pass, as long as their sum keeps within the obstacle's bound: with one prompt for each pass,
        a queue of prompts that take less time than a pass would grow without end.
        """
        self._held = 0
        self.decided: list[tuple[QueueEntry, Placement | Rejection]] = []
        self.unfinished = False
        """Whether another pass, right after this one, may begin more requests."""

    def run(self, now: float) -> None:
        """The number of placements is bounded, however many requests wait."""
        queue, turn = self._model_queue, self._model_queue.turn
        queue.turn = 0
        for position, entry in enumerate(queue.in_order()):
            is_turn = position >= turn and not queue.turn
            if entry.awaits in self._reserved and not is_turn:
                continue
            if self._held >= HELD_MAX or len(self.decided) >= BEGUN_MAX:
                queue.turn = queue.turn or turn
                self.unfinished = self.unfinished or len(self.decided) >= BEGUN_MAX
                return
            if is_turn:
                queue.turn = position + 1
            self._decide(entry, self._place(entry.request, now), now)

    def _decide(self, entry: QueueEntry, result: Placement | Rejection, now: float) -> None:
        if isinstance(result, Rejection):
            if result.reason is Reason.WORKER_BUSY:
                self._hold(entry, ANY_WORKER)
            else:
                self.decided.append((entry, result))
            return
        given_s = self._given_s.get(prefill_worker(result), 0.0)
        awaits = self._obstacle(entry, result, now, given_s)
        if awaits is not None and self._tries_elsewhere:
            other = self._elsewhere(entry, result, now, self._given_s)
            self._tries_elsewhere = other is not None
            if other is not None:
                result, awaits = other, None
        prefill, decode = prefill_worker(result), result.decode.record.worker_id
        given_s = self._given_s.get(prefill, 0.0)
        if awaits is not None and given_s:
            self.unfinished = True
            self._hold(entry, awaits)
        elif awaits is not None:
            self._hold(entry, awaits)
        elif prefill in self._reserved or decode in self._reserved:
            self._hold(entry, prefill if prefill in self._reserved else decode)
        else:
            self._given_s[prefill] = given_s + entry.work_s
            self.decided.append((entry, result))

    def _hold(self, entry: QueueEntry, awaits: WorkerId) -> None:
        self._held += 1
        self._reserved.add(awaits)
        self._model_queue.set_awaited(entry, awaits)


def prefill_worker(placement: Placement) -> WorkerId:
    """The worker that computes the prompt."""
    return (placement.prefill or placement.decode).record.worker_id
