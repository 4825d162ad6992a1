"""Dynamo's KV router (ai-dynamo/dynamo, ``docs/components/router/router-concepts.md``, 2026).

    adjusted_prefill_blocks = max(active_prefill_blocks + incoming_prompt_blocks - overlap_credit_blocks, 0)
    cost = prefill_load_scale * adjusted_prefill_blocks + active_decode_blocks + incoming_active_blocks

and the smallest cost wins (temperature 0, the default), at random among equals. Documented defaults: credit of a block
in device memory 1.0, no credit decay, prefill load scale 1; a prompt counts at full value until its first token; the
blocks of requests in flight are counted by the router. Disaggregated, the prefill router does not count active blocks
and the decode router gives no credit for overlap. To sweep: the overlap credit (1.0) or the load scale.
"""

from __future__ import annotations

from collections.abc import Sequence

from replay.policies.base import Baseline, PolicyContext
from services.router.placement.placement import PlacementRequest
from services.router.state.worker_view import WorkerView
from shared.contracts.ids import WorkerId
from shared.contracts.workers import Role


class DynamoKvCost(Baseline):
    """See the module."""

    def __init__(self, context: PolicyContext, prefill_load_scale: float = 1.0, credit: float = 1.0) -> None:
        super().__init__(context)
        self._scale = prefill_load_scale
        self._credit = credit

    def choose(
        self, request: PlacementRequest, workers: Sequence[WorkerView], matches: dict[WorkerId, int]
    ) -> WorkerView:
        """The smallest cost."""
        size = self.profile.block_tokens
        incoming = -(-request.prompt_tokens // size)
        costs = []
        for view in workers:
            active = self.active(view)
            overlap = self._credit * matches.get(view.record.worker_id, 0)
            adjusted = max(active.prefill_tokens / size + incoming - overlap, 0.0)
            decode = active.context_tokens / size + incoming if view.record.role is not Role.PREFILL else 0.0
            costs.append(self._scale * adjusted + decode)
        return self.least(workers, costs)

    def choose_decode(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> WorkerView:
        """The fewest active blocks."""
        return self.least(workers, [self.active(view).context_tokens for view in workers])
