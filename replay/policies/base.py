"""What the baselines have in common: they choose one worker by a rule, and know what the router knows."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from replay.profile import Profile
from replay.request_counts import Active, Ledger
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.placement.request_fields import Mode
from services.router.state.cluster_view import WorkerView
from services.router.state.fleet import Fleet
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import KvSource
from shared.contracts.workers import Role

TOKENS_OUT_UNKNOWN = 256
NOBODY = Rejection(reason=Reason.NO_WORKER, message="No worker is there.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a policy is made with."""

    fleet: Fleet
    ledger: Ledger
    profile: Profile
    """For policies that are published with a model of the engine that was fitted offline: here it is exact."""
    slo_ttft_s: float
    slo_itl_s: float
    seed: int


class Baseline(ABC):
    """A ``Placer``. On a fleet of prefill and decode workers each leg's worker is chosen by its own rule, and decode
    is dispatched with prefill under the same conditions as Baton's.
    """

    def __init__(self, around: Surroundings) -> None:
        self.fleet = around.fleet
        self.profile = around.profile
        self.chance = random.Random(around.seed)
        self._ledger = around.ledger
        self._by_role: dict[Role, list[WorkerView]] = {}
        self._count = -1

    @abstractmethod
    def choose(
        self, need: PlacementRequest, workers: Sequence[WorkerView], matches: dict[WorkerId, int]
    ) -> WorkerView | Rejection:
        """Who computes the prompt. ``matches``: how many blocks of it each worker holds, by the prefix index."""

    def choose_decode(self, _need: PlacementRequest, workers: Sequence[WorkerView]) -> WorkerView:
        """Who answers, when that is somebody else: the one with the fewest requests, unless a policy says more."""
        return self.least(workers, [self.active(view).requests for view in workers])

    def sources(
        self, _need: PlacementRequest, _chosen: WorkerView, _matches: dict[WorkerId, int]
    ) -> tuple[KvSource, ...]:
        """Whom the worker that computes the prompt should ask for KV first: nobody, unless a policy says so."""
        return ()

    def place(self, need: PlacementRequest, _now: float) -> Placement | Rejection:
        """Either one worker for all of it, or two."""
        both, prefills, decodes = (self._workers(role) for role in (Role.BOTH, Role.PREFILL, Role.DECODE))
        if not both and not (prefills and decodes):
            return NOBODY
        matches = self.fleet.index.match(need.hashes)
        chosen = self.choose(need, both or prefills, matches)
        if isinstance(chosen, Rejection):
            return chosen
        sources = self.sources(need, chosen, matches)
        size = self.profile.block_tokens
        limit = (need.prompt_tokens - 1) // size
        blocks = min(limit, matches.get(chosen.record.worker_id, 0))
        fetched = max(0, max((min(limit, source.end) for source in sources), default=0) - blocks)
        uncached = need.prompt_tokens - (blocks + fetched) * size
        apart = not both
        policy = self.fleet.policy
        streamed = apart and 0 <= policy.stream_tokens_min <= uncached
        return Placement(
            mode=Mode.DISAGGREGATED if apart else Mode.AGGREGATED,
            decode=self.choose_decode(need, decodes) if apart else chosen,
            prefill=chosen if apart else None,
            cached_tokens=blocks * size,
            fetched_tokens=fetched * size,
            uncached_tokens=uncached,
            context_tokens=need.prompt_tokens + (need.tokens_out or TOKENS_OUT_UNKNOWN),
            sources=sources,
            streamed=streamed,
        )

    def active(self, view: WorkerView) -> Active:
        """What the router itself has sent there."""
        return self._ledger.active[view.record.worker_id]

    def predicted(self, prefill_s: float) -> None:
        """Remember what the prompt that is being placed should take."""
        assert self._ledger.flight is not None
        self._ledger.predicted_s[self._ledger.flight.number] = prefill_s

    def least(self, workers: Sequence[WorkerView], costs: Sequence[float]) -> WorkerView:
        """One with the smallest cost, at random among equals."""
        smallest = min(costs)
        return self.chance.choice([view for view, cost in zip(workers, costs, strict=True) if cost == smallest])

    def _workers(self, role: Role) -> list[WorkerView]:
        workers = self.fleet.cluster.workers
        if self._count != len(workers):
            self._count = len(workers)
            self._by_role = {one: [] for one in Role}
            for view in workers.values():
                self._by_role[view.record.role].append(view)
        return self._by_role[role]
