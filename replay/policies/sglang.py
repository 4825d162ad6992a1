"""SGLang's gateway, policy ``cache_aware`` (lightseekorg/smg, ``model_gateway/src/policies/cache_aware.rs``, 2026).

Imbalanced, that is max - min > ``balance_abs`` and max > ``balance_rel`` * min requests in flight: the shortest queue.
Otherwise the worker that a tree of routed prompts says has seen most of this one, if that is more than
``cache_threshold`` of it; if not, the least loaded one. Defaults are those of its command line: 0.3, 64, 1.5, a tree of
67,108,864 tokens for each worker, trimmed to that, least recently used first, every 120 s.

The exact variant, for engines that tell KV events, takes the largest overlap by the prefix index instead of the tree;
equal overlaps go to the less loaded. The parameter to sweep is the threshold, and ``balance_abs``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from replay.policies.base import Baseline, PolicyContext
from services.router.placement.placement import PlacementRequest
from services.router.state.worker_view import WorkerView
from shared.contracts.ids import WorkerId

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
    """See the module."""

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
