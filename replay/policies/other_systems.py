"""Placement policies of other systems from their published descriptions, with their published settings."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from replay.policies.base import TOKENS_OUT_UNKNOWN, Baseline, PolicyContext
from services.router.placement.placement import PlacementRequest, Rejection
from services.router.state.worker_view import WorkerView
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import KvSource
from shared.contracts.workers import Role


class DynamoKvCost(Baseline):
    """Dynamo's KV router (ai-dynamo/dynamo, ``docs/components/router/router-concepts.md``, 2026).

        adjusted_prefill_blocks = max(active_prefill_blocks + incoming_prompt_blocks - overlap_credit_blocks, 0)
        cost = prefill_load_scale * adjusted_prefill_blocks + active_decode_blocks + incoming_active_blocks

    and the smallest cost wins (temperature 0, the default), at random among equals. Documented defaults: credit of a
    block in device memory 1.0, no credit decay, prefill load scale 1; a prompt counts at full value until its first
    token; the blocks of requests in flight are counted by the router. Disaggregated, the prefill router does not count
    active blocks and the decode router gives no credit for overlap. To sweep: the overlap credit (1.0) or the
    load scale.
    """

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


THRESHOLD = 1.0
"""Fetch any longer prefix: on these engines reading is cheaper than computing, so no larger value does better."""


class MooncakeConductor(Baseline):
    """Mooncake's Conductor (Qin et al., FAST'25, Algorithm 1: cache-aware, balancing prefill scheduling).

    For each prefill instance: if the best instance's prefix is more than ``kvcache_balancing_threshold`` times as long
    as this one's, it fetches the difference (T_transfer) and computes the rest, else it computes all behind its own
    prefix.
    TTFT = T_transfer + T_queue + T_prefill(length, prefix); the instance with the least is chosen; T_queue is the sum
    of the prefill times of what is queued there. Times are predicted by a regression fitted offline: here the simulated
    engine's exact model replaces it. The threshold is tuned by hand (the paper gives no value); it is the parameter to
    sweep. A request whose TTFT or TBT would miss the SLO is refused: ``rejecting``. The decode instance is the one with
    the smallest predicted TBT (SelectDecodingInstance).
    """

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


TREE_TOKENS_MAX = 67_108_864
EVICT_EVERY_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Of its command line."""

    cache_threshold: float = 0.3
    balance_abs: int = 64
    balance_rel: float = 1.5
    exact: bool = False


class RoutedPrompts:
    """Which blocks were routed to one worker, the least recently used first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def depth(self, hashes: Sequence[int]) -> int:
        """How many blocks of a prompt, from its start."""
        blocks = self._blocks
        for index, block in enumerate(hashes):
            if block not in blocks:
                return index
        return len(hashes)

    def add(self, hashes: Sequence[int]) -> None:
        """A prompt is routed there."""
        for block in reversed(hashes):
            self._blocks[block] = None
            self._blocks.move_to_end(block)

    def trim(self, blocks_max: int) -> None:
        """The ends of prompts are forgotten before their beginnings."""
        while len(self._blocks) > blocks_max:
            self._blocks.popitem(last=False)


class SglangCacheAware(Baseline):
    """SGLang's gateway, policy ``cache_aware`` (lightseekorg/smg, ``model_gateway/src/policies/cache_aware.rs``, 2026).

    Imbalanced, that is max - min > ``balance_abs`` and max > ``balance_rel`` * min requests in flight: the shortest
    queue. Otherwise the worker that a tree of routed prompts says has seen most of this one, if that is more than
    ``cache_threshold`` of it; if not, the least loaded one. Defaults are those of its command line: 0.3, 64, 1.5, a
    tree of 67,108,864 tokens for each worker, trimmed to that, least recently used first, every 120 s.

    The exact variant, for engines that tell KV events, takes the largest overlap by the prefix index instead of the
    tree; equal overlaps go to the less loaded. The parameter to sweep is the threshold, and ``balance_abs``.
    """

    def __init__(self, context: PolicyContext, parameters: Parameters = Parameters()) -> None:
        super().__init__(context)
        self._parameters = parameters
        self._trees: dict[WorkerId, RoutedPrompts] = {}
        self._trimmed_at = 0.0

    def place(self, request: PlacementRequest, now: float):  # type: ignore[no-untyped-def]  # noqa: ANN201
        """Its tree is trimmed now and then."""
        if now - self._trimmed_at >= EVICT_EVERY_S:
            self._trimmed_at = now
            for tree in self._trees.values():
                tree.trim(TREE_TOKENS_MAX // self.profile.block_tokens)
        return super().place(request, now)

    def choose(
        self, request: PlacementRequest, workers: Sequence[WorkerView], matches: dict[WorkerId, int]
    ) -> WorkerView:
        """Balance first, then the cache."""
        loads = [self.active(view).requests for view in workers]
        chosen = self._choose(request, workers, loads, matches)
        if not self._parameters.exact:
            self._trees.setdefault(chosen.record.worker_id, RoutedPrompts()).add(request.hashes)
        return chosen

    def _choose(
        self, request: PlacementRequest, workers: Sequence[WorkerView], loads: list[int], matches: dict[WorkerId, int]
    ) -> WorkerView:
        parameters = self._parameters
        smallest, largest = min(loads), max(loads)
        if largest - smallest > parameters.balance_abs and largest > parameters.balance_rel * smallest:
            return self.least(workers, loads)
        if parameters.exact:
            return self._by_overlap(workers, loads, matches)
        depths = [self._depth(view, request.hashes) for view in workers]
        deepest = max(depths)
        if deepest * self.profile.block_tokens > parameters.cache_threshold * request.prompt_tokens:
            return self.least(workers, [-depth for depth in depths])
        return self.least(workers, loads)

    def _by_overlap(self, workers: Sequence[WorkerView], loads: list[int], matches: dict[WorkerId, int]) -> WorkerView:
        overlaps = [matches.get(view.record.worker_id, 0) for view in workers]
        most = max(overlaps)
        tied = [(load, view) for load, view, overlap in zip(loads, workers, overlaps, strict=True) if overlap == most]
        return self.least([view for _load, view in tied], [load for load, _view in tied])

    def _depth(self, view: WorkerView, hashes: Sequence[int]) -> int:
        tree = self._trees.get(view.record.worker_id)
        return tree.depth(hashes) if tree is not None else 0
