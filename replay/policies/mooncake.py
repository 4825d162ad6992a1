"""Mooncake's Conductor (Qin et al., FAST'25, Algorithm 1: cache-aware, balancing prefill scheduling).

For each prefill instance: if the best instance's prefix is more than ``kvcache_balancing_threshold`` times as long as
this one's, it fetches the difference (T_transfer) and computes the rest, else it computes all behind its own prefix.
TTFT = T_transfer + T_queue + T_prefill(length, prefix); the instance with the least is chosen; T_queue is the sum of
the prefill times of what is queued there. Times are predicted by a regression fitted offline: here the simulated
engine's exact model replaces it. The threshold is tuned by hand (the paper gives no value); it is the parameter to
sweep. A request whose TTFT or TBT would miss the SLO is refused: ``rejecting``. The decode instance is the one with the
smallest predicted TBT (SelectDecodingInstance).
"""

from __future__ import annotations

from collections.abc import Sequence

from replay.policies.base import TOKENS_OUT_UNKNOWN, Baseline, PolicyContext
from services.router.placement.placement import PlacementRequest, Rejection
from services.router.state.worker_view import WorkerView
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import KvSource

THRESHOLD = 1.0
"""Fetch any longer prefix: on these engines reading is cheaper than computing, so no larger value does better."""


class MooncakeConductor(Baseline):
    """See the module."""

    def __init__(self, context: PolicyContext, threshold: float = THRESHOLD, *, rejecting: bool = False) -> None:
        super().__init__(context)
        self._threshold = threshold
        self._rejecting = rejecting
        self._slo = context.slo_ttft_s, context.slo_itl_s
        self._fetching: set[WorkerId] = set()

    def choose(
        self, request: PlacementRequest, workers: Sequence[WorkerView], matches: dict[WorkerId, int]
    ) -> WorkerView | Rejection:
        """The least TTFT."""
        profile, size = self.profile, self.profile.block_tokens
        limit = (request.prompt_tokens - 1) // size
        best = min(limit, max(matches.values(), default=0))
        with_best_s = profile.prompt_s(request.prompt_tokens, best * size)
        times, prefills = [], []
        self._fetching.clear()
        for view in workers:
            own = min(limit, matches.get(view.record.worker_id, 0))
            fetches = best > own * self._threshold and best > own
            if fetches:
                self._fetching.add(view.record.worker_id)
                transfer_s = profile.ask_s + profile.transfer_s((best - own) * size)
                prefill_s = with_best_s
            else:
                transfer_s, prefill_s = 0.0, profile.prompt_s(request.prompt_tokens, own * size)
            prefills.append(prefill_s)
            times.append(transfer_s + self.active(view).prefill_s + prefill_s)
        chosen = self.least(workers, times)
        at = next(index for index, view in enumerate(workers) if view is chosen)
        if self._rejecting and (times[at] > self._slo[0] or self._tbt_s(request, chosen) > self._slo[1]):
            return Rejection(reason=Reason.OVERLOADED, message="The targets would be missed.")
        self.predicted(prefills[at])
        return chosen

    def sources(
        self, _request: PlacementRequest, chosen: WorkerView, matches: dict[WorkerId, int]
    ) -> tuple[KvSource, ...]:
        """The instance with the longest prefix."""
        if chosen.record.worker_id not in self._fetching:
            return ()
        holder = max(matches, key=lambda worker_id: matches[worker_id])
        own = matches.get(chosen.record.worker_id, 0)
        record = self.fleet.cluster.workers[holder].record
        return (KvSource(worker_id=holder, epoch=record.epoch, first=own, end=matches[holder]),)

    def choose_decode(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> WorkerView:
        """The smallest time between tokens."""
        return self.least(workers, [self._tbt_s(request, view) for view in workers])

    def _tbt_s(self, request: PlacementRequest, view: WorkerView) -> float:
        active, profile = self.active(view), self.profile
        context = active.context_tokens + request.prompt_tokens + (active.requests + 1) * TOKENS_OUT_UNKNOWN / 2
        return profile.decode_s(active.requests + 1, context)
