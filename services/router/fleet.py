"""Everything placement looks at, in one place: the cluster's view, the prefix index and the operator's policy."""

from __future__ import annotations

from services.router.core.cluster_view import ClusterView
from services.router.core.kv_sources import exchanges_kv
from services.router.core.placement import Need, Placed, Policy, Refused, place
from services.router.core.prefix_index import PrefixIndex
from shared.contracts.workers import Role


class Fleet:
    """Fed by ``fleet_feed`` and ``kv_feed``, asked by ``relay``."""

    def __init__(self, policy: Policy) -> None:
        self.cluster = ClusterView()
        self.index = PrefixIndex()
        self.policy = policy

    def place(self, need: Need, now: float) -> Placed | Refused:
        """Which workers serve it."""
        return place(need, self.cluster, self.index, self.policy, now)

    def prompt_matters(self, model: str, whole: str) -> bool:
        """Whether more than one worker could compute a prompt of this model, or give what it holds of it to the one
        that does: else its prefix decides nothing.
        """
        choices = 0
        for view in self.cluster.offering(model):
            if whole or view.record.role is not Role.DECODE or exchanges_kv(view.record):
                choices += 1
                if choices > 1:
                    return True
        return False

    def ready(self, now: float) -> bool:
        """Whether anybody could be given a request."""
        return any(view.fit(now, self.policy.silent_s_max) for view in self.cluster.workers.values())
