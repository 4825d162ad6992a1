"""Cost models of Dynamo, llm-d and Mooncake from their published descriptions, with their published settings."""

from __future__ import annotations

from collections.abc import Sequence

from bench.policies.base import TOKENS_OUT_UNKNOWN, Baseline, PolicyContext
from services.router.placement.placement import PlacementRequest, Rejection
from services.router.state.worker_view import WorkerView
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import KvSource
from shared.contracts.workers import Role


class DynamoKvCost(Baseline):
    """Dynamo's KV router (ai-dynamo/dynamo 1.6.1, ``docs/components/router/router-concepts.md`` and
    ``lib/kv-router/src/scheduling/selector/default.rs``; compared with its own code by ``bench.peer_decisions``).

        adjusted_prefill_blocks = max((active_prefill_tokens + prompt_tokens) / block_tokens - overlap_credit_blocks, 0)
        cost = scale * adjusted_prefill_blocks + decode_blocks

    and the smallest cost wins (temperature 0, the default), at random among equals. ``decode_blocks`` are the full
    blocks of the prompts in flight there and of this one, each counted once. A prompt counts at full value until its
    first token. Disaggregated, the prefill router counts no decode blocks and the decode router gives no credit for
    overlap. Documented defaults: prefill load scale 1, credit of a block in device memory 1.0, ``decay`` 0. The latter
    divides the credit of a worker by 1 + decay * (its active prefill tokens - the least loaded worker's) / tokens of
    the prompt's blocks.
    """

    def __init__(self, context: PolicyContext, scale: float = 1.0, credit: float = 1.0, decay: float = 0.0) -> None:
        super().__init__(context)
        self._scale = scale
        self._credit = credit
        self._decay = decay

    def choose(
        self, request: PlacementRequest, workers: Sequence[WorkerView], matches: dict[WorkerId, int]
    ) -> WorkerView:
        """The smallest cost."""
        size = self.profile.block_tokens
        prompt_tokens = size * -(-request.prompt_tokens // size)
        costs = []
        floor = min(self.active(view).prefill_tokens for view in workers)
        for view in workers:
            active = self.active(view)
            credit = self._credit / (1.0 + self._decay * (active.prefill_tokens - floor) / prompt_tokens)
            overlap = credit * matches.get(view.record.worker_id, 0)
            adjusted = max((active.prefill_tokens + request.prompt_tokens) / size - overlap, 0.0)
            decode = active.blocks_with(request.hashes, size) if view.record.role is not Role.PREFILL else 0.0
            costs.append(self._scale * adjusted + decode)
        return self.least(workers, costs)

    def choose_decode(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> WorkerView:
        """The fewest blocks."""
        size = self.profile.block_tokens
        return self.least(workers, [self.active(view).blocks_with(request.hashes, size) for view in workers])


class LlmDScorer(Baseline):
    """llm-d's inference scheduler (llm-d/llm-d-router, ``pkg/epp/framework/plugins/scheduling``, 2026).

    A weighted sum of scores between 0 and 1, and the worker with the largest wins, at random among equals:
        prefix:         matched blocks / blocks of the prompt (from KV events: ``precise-prefix-cache``)
        queue:          1 for the shortest queue, 0 for the longest, linear between (1 for all when all are equal)
        kv utilisation: 1 - share of the KV cache in use
    Queue and utilisation are what workers report. The weights are those of the published guides for prefix-aware
    routing: prefix 3, utilisation 2, queue 2. The parameter to sweep is the prefix weight.
    """

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
        queues = [float(view.reported_waiting) for view in workers]
        shortest, longest = min(queues), max(queues)
        spread = longest - shortest
        weight, queue_weight, utilisation_weight = self._weights
        costs = []
        for view, share, queue in zip(workers, prefix, queues, strict=True):
            queue_score = (longest - queue) / spread if spread else 1.0
            costs.append(-(weight * share + queue_weight * queue_score + utilisation_weight * (1.0 - view.kv_used)))
        return self.least(workers, costs)


class LlmDSticky(Baseline):
    """llm-d's default since its release 0.9, *sticky until saturated* (llm-d/llm-d-router ebab687,
    ``pkg/epp/framework/plugins/scheduling/filter/prefixcacheaffinity``, ``scorer/tokenload`` and
    ``requestcontrol/dataproducer/inflightload``; llm-d/llm-d, guide ``optimized-baseline``).

    Workers with at least ``affinity`` of the prompt's blocks are sticky; if there are any, the others are left out,
    unless the least in-flight tokens of the sticky ones exceed the least of the others by more than ``penalty_s``
    seconds of the peak prefill rate. Of what is left the worker with the fewest in-flight tokens is chosen, at random
    among equals. In-flight tokens are the uncached ones of prompts without a first token. The peak rate is what its
    guide measures: one unloaded chunk of ``max_num_batched_tokens``. Defaults 0.8 and 18 s. A decode worker is the one
    with the fewest requests (``active-request-scorer`` in its guide for disaggregation).
    """

    def __init__(self, context: PolicyContext, affinity: float = 0.8, penalty_s: float = 18.0) -> None:
        super().__init__(context)
        self._affinity = affinity
        chunk = context.profile.max_num_batched_tokens
        self._penalty_tokens = penalty_s * chunk / context.profile.prompt_s(chunk, 0)

    def choose(
        self, request: PlacementRequest, workers: Sequence[WorkerView], matches: dict[WorkerId, int]
    ) -> WorkerView:
        """The fewest in-flight tokens, of the sticky workers while they are not saturated."""
        blocks = max(1, len(request.hashes))
        sticky: list[WorkerView] = []
        others: list[WorkerView] = []
        for view in workers:
            share = matches.get(view.record.worker_id, 0) / blocks
            (sticky if share >= self._affinity else others).append(view)
        if sticky and not self._saturated(sticky, others):
            workers = sticky
        return self.least(workers, self._tokens(workers))

    def _saturated(self, sticky: Sequence[WorkerView], others: Sequence[WorkerView]) -> bool:
        if not others:
            return False
        return min(self._tokens(sticky)) - min(self._tokens(others)) > self._penalty_tokens

    def _tokens(self, workers: Sequence[WorkerView]) -> list[float]:
        return [self.active(view).prefill_tokens for view in workers]


THRESHOLD = 1.0
"""Fetch any longer prefix: on these engines reading is cheaper than computing, so no larger value does better."""


class MooncakeConductor(Baseline):
    """Mooncake's Conductor (Qin et al., FAST'25, Algorithm 1: cache-aware, balancing prefill scheduling).

    For each prefill instance: if the best instance's prefix is more than ``kvcache_balancing_threshold`` times as long
    as this one's, it fetches the difference (T_transfer) and computes the rest, else it computes all behind its own
    prefix. TTFT = T_transfer + T_queue + T_prefill(length, prefix); the instance with the least is chosen; T_queue is
    the sum of the prefill times of what is queued there. Times are predicted by a regression fitted offline: here the
    simulated engine's exact model replaces it. The threshold is tuned by hand (the paper gives no value); it is the
    parameter to sweep. A request whose TTFT or TBT would miss the SLO is refused if ``margin`` is set. The decode
    instance is the one with the smallest predicted TBT (SelectDecodingInstance). With a margin, the TTFT must keep
    ``margin`` times its target; 0 refuses nothing.
    """

    def __init__(self, context: PolicyContext, threshold: float = THRESHOLD, margin: float = 0.0) -> None:
        super().__init__(context)
        self._threshold = threshold
        self._margin = margin
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
        times = []
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
            times.append(transfer_s + self.active(view).prefill_s + prefill_s)
        chosen = self.least(workers, times)
        at = next(index for index, view in enumerate(workers) if view is chosen)
        late = self._margin and times[at] > self._margin * self._slo[0]
        if late or (self._margin and self._least_tbt_s(request, chosen) > self._slo[1]):
            return Rejection(reason=Reason.OVERLOADED, message="The targets would be missed.")
        return chosen

    def _least_tbt_s(self, request: PlacementRequest, chosen: WorkerView) -> float:
        decodes = self.workers(Role.DECODE) or [chosen]
        return min(self._tbt_s(request, view) for view in decodes)

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
