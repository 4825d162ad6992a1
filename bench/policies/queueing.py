"""A queue in the router in front of any placement rule, and refusal of requests that would be late.

Together with the rules they make the factorial placement rule x queueing x refusal: one queue and one prediction for
all rules, so that a difference between two systems is due to one factor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush

import msgspec

from bench.policies.base import TOKENS_OUT_UNKNOWN
from bench.policies.world import RequestCounts
from replay.legs import ReplayedRequest
from replay.profile import Profile
from services.router.placement.fleet import Fleet
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.placement.slo import Targets
from services.router.state.worker_view import WorkerView
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId
from shared.contracts.workers import Role

LATE = Rejection(reason=Reason.OVERLOADED, message="The target would be missed.")
NOBODY: frozenset[WorkerId] = frozenset()


class Order(StrEnum):
    """Which waiting request is placed first."""

    FIRST_COME = "fcfs"
    SHORTEST = "sjf"
    """The least prefill time, given the longest prefix that any worker held when the request arrived."""
    UNCACHED = "wspt"
    """The fewest tokens behind that prefix: Dynamo's ``wspt`` for requests of equal priority."""
    DEADLINE = "edf"
    """Arrival + target of TTFT + ``own_weight`` times the request's prefill time. With one target for all requests, a
    weight of 0 is first come, first served; Baton's own queue uses 1.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueContext:
    """What gates, orders and refusal read: what the router knows, and the offline model of the engine."""

    fleet: Fleet
    counts: RequestCounts
    profile: Profile
    targets: Targets

    def computing(self) -> list[WorkerView]:
        """Workers that compute prompts."""
        return [view for view in self.fleet.cluster.workers.values() if view.record.role is not Role.DECODE]


class Gate(ABC):
    """When requests may leave the queue."""

    def __init__(self, context: QueueContext) -> None:
        self.context = context

    @abstractmethod
    def excluded(self) -> frozenset[WorkerId] | None:
        """Workers that the next request must not go to; None: it has to wait."""


class OpenGate(Gate):
    """No request waits."""

    def excluded(self) -> frozenset[WorkerId]:
        """None of them."""
        return NOBODY


class RoomGate(Gate):
    """A worker is full while the prompt tokens that were sent to it and are not computed exceed ``room`` times the
    tokens of one step. Full workers are excluded from the choice; while all are full, requests wait.
    """

    leaves_out = True

    def __init__(self, context: QueueContext, room: float) -> None:
        super().__init__(context)
        self._tokens_max = room * context.profile.max_num_batched_tokens

    def excluded(self) -> frozenset[WorkerId] | None:
        """Full workers."""
        active = self.context.counts.active
        ids = [view.record.worker_id for view in self.context.computing()]
        full = [worker_id for worker_id in ids if active[worker_id].prefill_tokens > self._tokens_max]
        if ids and len(full) == len(ids):
            return None
        return frozenset(full) if self.leaves_out else NOBODY


class BusyGate(RoomGate):
    """Dynamo's router queue (ai-dynamo/dynamo 1.6.1, ``lib/kv-router/src/scheduling/queue.rs``,
    ``all_workers_prefill_busy_with``; ``--router-queue-threshold``, off by default): requests wait while the active
    prefill tokens of every worker exceed the threshold times ``max_num_batched_tokens``. One that leaves the queue may
    go to any worker.
    """

    leaves_out = False


class SaturationGate(Gate):
    """llm-d's flow control with its default detector (llm-d/llm-d-router ebab687,
    ``pkg/epp/framework/plugins/flowcontrol/saturationdetector/utilization``): requests wait while the mean over workers
    of max(waiting requests / ``queue_depth``, KV utilisation / ``kv_utilisation``) is 1 or more, by the workers'
    reports. Defaults 5 and 0.8.
    """

    def __init__(self, context: QueueContext, queue_depth: float = 5.0, kv_utilisation: float = 0.8) -> None:
        super().__init__(context)
        self._limits = queue_depth, kv_utilisation

    def excluded(self) -> frozenset[WorkerId] | None:
        """None of them, while the pool is not saturated."""
        views = self.context.computing()
        return NOBODY if sum(map(self._score, views)) < max(1, len(views)) else None

    def _score(self, view: WorkerView) -> float:
        if not view.has_reported:
            return 1.0  # as a worker whose metrics are stale
        depth, utilisation = self._limits
        return max(view.reported_waiting / depth, view.kv_used / utilisation)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request is refused when its predicted TTFT exceeds ``margin`` times the target, or the predicted time between
    tokens its target (Mooncake, FAST'25, algorithm 1, with a margin of 1): when it is placed, and before that when even
    an idle worker that holds the longest known prefix would miss the margin.
    """

    context: QueueContext
    margin: float

    def hopeless(self, entry: Entry, now: float) -> bool:
        """Whether it has waited too long already."""
        return now - entry.arrived_at + entry.own_s > self.margin * self.context.targets.ttft_s

    def late(self, entry: Entry, placement: Placement, now: float) -> bool:
        """Whether it would be late where it is placed."""
        profile, counts = self.context.profile, self.context.counts
        computing = placement.prefill or placement.decode
        fetched = placement.fetched_tokens
        fetch_s = profile.ask_s + profile.transfer_s(fetched) if fetched else 0.0
        queue_s = counts.active[computing.record.worker_id].prefill_s
        ttft_s = now - entry.arrived_at + fetch_s + queue_s + prefill_s(profile, entry.request, placement)
        if ttft_s > self.margin * self.context.targets.ttft_s:
            return True
        active = counts.active[placement.decode.record.worker_id]
        requests = active.requests + 1
        tokens = active.context_tokens + entry.request.prompt_tokens + requests * TOKENS_OUT_UNKNOWN / 2
        return profile.decode_s(requests, tokens) > self.context.targets.itl_s


def prefill_s(profile: Profile, request: PlacementRequest, placement: Placement) -> float:
    """Seconds to compute what is neither cached nor fetched, by the offline model of the engine."""
    return profile.prompt_s(request.prompt_tokens, placement.cached_tokens + placement.fetched_tokens)


@dataclass(slots=True, eq=False)
class Entry:
    """One waiting request."""

    replayed: ReplayedRequest
    request: PlacementRequest
    arrived_at: float
    own_s: float
    """Its prefill time, given the longest prefix that any worker held when it arrived."""
    uncached_tokens: int
    """Tokens behind that prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queueing:
    """How one system queues and refuses; the parts of a ``GatedQueue``."""

    gate: Gate
    order: Order = Order.FIRST_COME
    own_weight: float = 1.0
    refusal: Refusal | None = None
    queue_s_max: float = float("inf")
    """A request that has waited for longer is refused."""


class GatedQueue:
    """Waiting requests of a router. Implements ``replay.router.RouterQueue``.

    A request that a gate lets through is placed at once by the fleet's rule, with what the router knows then.
    """

    def __init__(
        self, context: QueueContext, queueing: Queueing, at: Callable[..., None], decided: Callable[..., None]
    ) -> None:
        self._context = context
        self._queueing = queueing
        self._at = at
        self._decided = decided
        self._entries: list[tuple[float, int, Entry]] = []
        self._numbers = 0
        self._pass_at = float("inf")

    @property
    def waiting(self) -> bool:
        """Whether requests wait."""
        return bool(self._entries)

    def offer(self, replayed: ReplayedRequest, wanted: PlacementRequest, now: float) -> None:
        """Queue an arriving request, and place as many as may leave the queue."""
        entry = self._entry(replayed, wanted, now)
        self._numbers += 1
        heappush(self._entries, (self._key(entry), self._numbers, entry))
        self.run_pass(now)

    def ended(self, _replayed: ReplayedRequest) -> None:
        """A placed request has ended; a pass is scheduled for that anyway."""

    def schedule_pass(self, now: float) -> None:
        """Schedule a pass, because something changed."""
        if self._entries and now < self._pass_at:
            self._pass_at = now
            self._at(now)

    def due(self, now: float) -> bool:
        """Whether this is the pass that was scheduled last."""
        if self._pass_at != now:
            return False
        self._pass_at = float("inf")
        return True

    def run_pass(self, now: float) -> None:
        """Place waiting requests in order until the gate closes."""
        while self._entries:
            entry = self._entries[0][-1]
            if self._gives_up(entry, now):
                heappop(self._entries)
                self._decided(now, entry.replayed, LATE)
                continue
            excluded = self._queueing.gate.excluded()
            if excluded is None:
                return
            self._context.counts.replayed = entry.replayed
            request = msgspec.structs.replace(entry.request, excluded=excluded) if excluded else entry.request
            outcome = self._context.fleet.place(request, now)
            if isinstance(outcome, Rejection) and outcome.reason is Reason.WORKER_BUSY:
                return
            heappop(self._entries)
            self._decided(now, entry.replayed, self._checked(entry, outcome, now))

    def _gives_up(self, entry: Entry, now: float) -> bool:
        queueing = self._queueing
        if queueing.refusal is not None and queueing.refusal.hopeless(entry, now):
            return True
        return now - entry.arrived_at > queueing.queue_s_max

    def _checked(self, entry: Entry, outcome: Placement | Rejection, now: float) -> Placement | Rejection:
        predicted = self._context.counts.predicted_s
        refusal, number = self._queueing.refusal, entry.replayed.number
        if isinstance(outcome, Rejection) or (refusal is not None and refusal.late(entry, outcome, now)):
            predicted.pop(number, None)
            return outcome if isinstance(outcome, Rejection) else LATE
        predicted[number] = prefill_s(self._context.profile, entry.request, outcome)
        return outcome

    def _entry(self, replayed: ReplayedRequest, request: PlacementRequest, now: float) -> Entry:
        profile = self._context.profile
        depth = max(self._context.fleet.index.match(request.hashes).values(), default=0)
        cached = profile.block_tokens * min(depth, (request.prompt_tokens - 1) // profile.block_tokens)
        tokens = request.prompt_tokens
        return Entry(replayed, request, now, profile.prompt_s(tokens, cached), tokens - cached)

    def _key(self, entry: Entry) -> float:
        order = self._queueing.order
        if order is Order.SHORTEST:
            return entry.own_s
        if order is Order.UNCACHED:
            return entry.uncached_tokens
        if order is Order.DEADLINE:
            return entry.arrived_at + self._queueing.own_weight * entry.own_s  # the same target for all
        return entry.arrived_at
