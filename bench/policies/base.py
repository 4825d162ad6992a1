"""Baseline policies: their base class, and the simple ones (random, round robin, least loaded, power of two).

A baseline chooses workers by a rule and knows what the router knows.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from bench.policies.world import Active, RequestCounts
from replay.profile import Profile
from services.router.placement.fleet import Fleet
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.request.facts import Mode
from services.router.state.worker_view import WorkerView
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import KvSource
from shared.contracts.workers import Role

TOKENS_OUT_UNKNOWN = 256
NO_WORKER = Rejection(reason=Reason.NO_WORKER, message="There is no worker.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyContext:
    """Constructor arguments of a policy."""

    fleet: Fleet
    counts: RequestCounts
    profile: Profile
    """Exact engine speeds, for published policies that use a model fitted offline."""
    slo_ttft_s: float
    slo_itl_s: float
    seed: int


class Baseline(ABC):
    """Implements ``Placer``. With prefill and decode workers it chooses each leg's worker by its own rule.

    The decode leg is dispatched together with the prefill leg under the same conditions as Baton's.
    """

    def __init__(self, context: PolicyContext) -> None:
        self.fleet = context.fleet
        self.profile = context.profile
        self.rng = random.Random(context.seed)
        self.equals: list[WorkerView] = []
        """The workers of the same smallest cost, at the last choice by cost."""
        self._counts = context.counts
        self._by_role: dict[Role, list[WorkerView]] = {}
        self._count = -1

    @abstractmethod
    def choose(
        self, request: PlacementRequest, workers: Sequence[WorkerView], matches: dict[WorkerId, int]
    ) -> WorkerView | Rejection:
        """The worker that computes the prompt. ``matches``: cached blocks of the prompt per worker."""

    def routed(self, request: PlacementRequest, chosen: WorkerView) -> None:  # noqa: B027  # most remember nothing
        """A request is sent to the worker that computes its prompt; for rules that remember that."""

    def choose_decode(self, _request: PlacementRequest, workers: Sequence[WorkerView]) -> WorkerView:
        """The decode worker; by default the one with the fewest requests."""
        return self.least(workers, [self.active(view).requests for view in workers])

    def sources(
        self, _request: PlacementRequest, _chosen: WorkerView, _matches: dict[WorkerId, int]
    ) -> tuple[KvSource, ...]:
        """Workers to fetch KV from before computing; by default none."""
        return ()

    def place(self, request: PlacementRequest, _now: float) -> Placement | Rejection:
        """Place on one worker, or on a prefill and a decode worker."""
        both, prefills, decodes = (self.workers(role) for role in (Role.BOTH, Role.PREFILL, Role.DECODE))
        if not both and not (prefills and decodes):
            return NO_WORKER
        computing = self._allowed(both or prefills, request)
        matches = self.fleet.index.match(request.hashes)
        chosen = self.choose(request, computing, matches)
        if isinstance(chosen, Rejection):
            return chosen
        self.routed(request, chosen)
        sources = self.sources(request, chosen, matches)
        size = self.profile.block_tokens
        limit = (request.prompt_tokens - 1) // size
        blocks = min(limit, matches.get(chosen.record.worker_id, 0))
        fetched = max(0, max((min(limit, source.end) for source in sources), default=0) - blocks)
        uncached = request.prompt_tokens - (blocks + fetched) * size
        self.predicted(self.profile.prompt_s(request.prompt_tokens, request.prompt_tokens - uncached))
        apart = not both
        policy = self.fleet.policy
        streamed = apart and 0 <= policy.stream_tokens_min <= uncached
        return Placement(
            mode=Mode.DISAGGREGATED if apart else Mode.AGGREGATED,
            decode=self.choose_decode(request, decodes) if apart else chosen,
            prefill=chosen if apart else None,
            cached_tokens=blocks * size,
            fetched_tokens=fetched * size,
            uncached_tokens=uncached,
            context_tokens=request.prompt_tokens + (request.tokens_out or TOKENS_OUT_UNKNOWN),
            sources=sources,
            streamed=streamed,
        )

    def active(self, view: WorkerView) -> Active:
        """The router's own legs at this worker."""
        return self._counts.active[view.record.worker_id]

    def predicted(self, prefill_s: float) -> None:
        """Store the predicted prefill time of the request that is being placed."""
        assert self._counts.replayed is not None
        self._counts.predicted_s[self._counts.replayed.number] = prefill_s

    def least(self, workers: Sequence[WorkerView], costs: Sequence[float]) -> WorkerView:
        """The worker with the smallest cost; ties are broken at random."""
        smallest = min(costs)
        self.equals = [view for view, cost in zip(workers, costs, strict=True) if cost == smallest]
        return self.rng.choice(self.equals)

    @staticmethod
    def _allowed(workers: list[WorkerView], request: PlacementRequest) -> list[WorkerView]:
        """All but those that a queue excludes because they are full; they may still be read from."""
        if not request.excluded:
            return workers
        return [view for view in workers if view.record.worker_id not in request.excluded]

    def workers(self, role: Role) -> list[WorkerView]:
        """All workers of a role."""
        workers = self.fleet.cluster.workers
        if self._count != len(workers):
            self._count = len(workers)
            self._by_role = {one: [] for one in Role}
            for view in workers.values():
                self._by_role[view.record.role].append(view)
        return self._by_role[role]


class RandomChoice(Baseline):
    """A random worker."""

    def choose(
        self, request: PlacementRequest, workers: Sequence[WorkerView], matches: dict[WorkerId, int]
    ) -> WorkerView:
        """Uniformly random."""
        return self.rng.choice(workers)

    def choose_decode(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> WorkerView:
        """Uniformly random."""
        return self.rng.choice(workers)


class RoundRobin(Baseline):
    """Each worker in turn."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._turns = {"first": 0, "decode": 0}

    def choose(
        self, request: PlacementRequest, workers: Sequence[WorkerView], matches: dict[WorkerId, int]
    ) -> WorkerView:
        """The next one."""
        return self._next("first", workers)

    def choose_decode(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> WorkerView:
        """The next decode worker."""
        return self._next("decode", workers)

    def _next(self, turn: str, workers: Sequence[WorkerView]) -> WorkerView:
        self._turns[turn] += 1
        return workers[(self._turns[turn] - 1) % len(workers)]


class LeastLoaded(Baseline):
    """The fewest requests in flight, as counted by the router; a tie is broken at random."""

    def choose(
        self, request: PlacementRequest, workers: Sequence[WorkerView], matches: dict[WorkerId, int]
    ) -> WorkerView:
        """By requests in flight."""
        return self.least(workers, [self.active(view).requests for view in workers])


class PowerOfTwo(Baseline):
    """The less loaded of two random workers (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing",
    2001).
    """

    def choose(
        self, request: PlacementRequest, workers: Sequence[WorkerView], matches: dict[WorkerId, int]
    ) -> WorkerView:
        """The less loaded of two."""
        return self._of_two(workers)

    def choose_decode(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> WorkerView:
        """The less loaded of two."""
        return self._of_two(workers)

    def _of_two(self, workers: Sequence[WorkerView]) -> WorkerView:
        two = self.rng.sample(workers, min(2, len(workers)))
        return min(two, key=lambda view: self.active(view).requests)
