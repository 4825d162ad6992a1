"""llm-d's inference scheduler (llm-d/llm-d-router, ``pkg/epp/framework/plugins/scheduling``, 2026).

A weighted sum of scores between 0 and 1, and the worker with the largest wins, at random among equals:
    prefix:         matched blocks / blocks of the prompt (from KV events: ``precise-prefix-cache``)
    queue:          1 for the shortest queue, 0 for the longest, linear between (1 for all when all are equal)
    kv utilisation: 1 - share of the KV cache in use
Queue and utilisation are what workers report. The weights are those of the published guides for prefix-aware routing:
prefix 3, utilisation 2, queue 2. The parameter to sweep is the prefix weight.
"""

from __future__ import annotations

from collections.abc import Sequence

from replay.policies.base import Baseline, PolicyContext
from services.router.placement.placement import PlacementRequest
from services.router.state.worker_view import WorkerView
from shared.contracts.ids import WorkerId


class LlmDScorer(Baseline):
    """See the module."""

    def __init__(
        self, context: PolicyContext, prefix: float = 3.0, queue: float = 2.0, utilisation: float = 2.0
    ) -> None:
        super().__init__(context)
        self._weights = prefix, queue, utilisation

    def choose(
        self, request: PlacementRequest, workers: Sequence[WorkerView], matches: dict[WorkerId, int]
    ) -> WorkerView:
        """The largest score."""
        blocks = max(1, len(request.hashes))
        prefix = [min(1.0, matches.get(view.record.worker_id, 0) / blocks) for view in workers]
        return self._best(workers, prefix)

    def choose_decode(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> WorkerView:
        """By load alone."""
        return self._best(workers, [0.0] * len(workers))

    def _best(self, workers: Sequence[WorkerView], prefix: Sequence[float]) -> WorkerView:
        queues = [float(view.load.waiting) if view.load is not None else 0.0 for view in workers]
        shortest, longest = min(queues), max(queues)
        spread = longest - shortest
        weight, queue_weight, utilisation_weight = self._weights
        costs = []
        for view, share, queue in zip(workers, prefix, queues, strict=True):
            load = view.load
            used = load.kv_blocks_used / load.kv_blocks_total if load is not None and load.kv_blocks_total else 0.0
            queue_score = (longest - queue) / spread if spread else 1.0
            costs.append(-(weight * share + queue_weight * queue_score + utilisation_weight * (1.0 - used)))
        return self.least(workers, costs)
