"""The fleet as placement sees it: view, prefix index and policy together, and the questions that others ask of them."""

from __future__ import annotations

from services.router.placement.placement import Placement, PlacementPolicy, PlacementRequest, Rejection
from services.router.placement.placer import CostPlacer, Placer
from services.router.request.facts import RequestFacts
from services.router.state.cluster_view import ClusterView
from services.router.state.prefix_index import PrefixIndex
from services.router.state.worker_view import WorkerView, can_exchange_kv
from shared.contracts.load import WorkerLoad
from shared.contracts.workers import Role, WorkerPhase


class Fleet:
    """The inputs of placement: the cluster's view, the prefix index and the operator's policy. Fed by ``FleetFeed`` and
    ``KvFeed``; used by admission and the relay.
    """

    def __init__(self, policy: PlacementPolicy) -> None:
        self.cluster = ClusterView()
        self.index = PrefixIndex()
        self.policy = policy
        self.placer: Placer = CostPlacer(self.cluster, self.index, policy)

    def place(self, request: PlacementRequest, now: float) -> Placement | Rejection:
        return self.placer.place(request, now)

    def report(self, load: WorkerLoad, now: float) -> bool:
        """A worker's load report; see ``ClusterView.report``."""
        return self.cluster.report(load, now, self.index.evictions(load.worker_id))

    def prompt_matters(self, facts: RequestFacts, body_bytes: int) -> bool:
        """Whether the prompt's prefix can influence the placement: more than one worker could compute the prompt, or
        the only one could fetch enough KV from others. No prompt has more tokens than bytes.
        """
        least = self.policy.fetch_tokens_min if facts.kv_fetch_min_tokens is None else facts.kv_fetch_min_tokens
        may_fetch = body_bytes >= least and not facts.unsplittable
        choices = 0
        for view in self.cluster.offering(facts.model):
            record = view.record
            computes = view.serves and (facts.unsplittable or record.role is not Role.DECODE)
            if computes or (may_fetch and can_exchange_kv(record)):
                choices += 1
                if choices > 1:
                    return True
        return False

    def ready(self, now: float) -> bool:
        """Whether any worker can take a request, now or when it is woken."""
        return any(self.offered(view, now) for view in self.cluster.workers.values())

    def offered(self, view: WorkerView, now: float) -> bool:
        """Whether clients may ask for the worker's models: it is ready, or sleeps."""
        sleeps = view.serves and view.registered and view.record.phase is WorkerPhase.ASLEEP
        return sleeps or view.fit(now, self.policy.silent_s_max)
