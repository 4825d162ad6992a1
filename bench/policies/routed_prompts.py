"""Routers that remember which prompts they sent where, instead of being told what workers hold: SGLang's gateway,
vLLM's router and the production stack's router.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.policies.base import Baseline, PolicyContext
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.state.worker_view import WorkerView
from shared.contracts.ids import WorkerId

CHARACTERS_PER_TOKEN = 4
"""A tree of HTTP requests counts characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """How much a router remembers of each worker, and how often it forgets the rest, least recently used first."""

    characters_max: int
    trimmed_every_s: float


STATS_WINDOW_S = 60.0
SGLANG_TREE = Tree(characters_max=2**26, trimmed_every_s=60.0)
VLLM_TREE = Tree(characters_max=2**25, trimmed_every_s=120.0)


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


class CacheAware(Baseline):
    """The rule ``cache_aware``, by which two routers go.

    Imbalanced, that is max - min > ``abs`` and max > ``rel`` * min requests in flight: the least loaded worker.
    Otherwise the worker that a tree of routed prompts says has seen most of this one, if that is more than
    ``threshold`` of it; if not, the least loaded one. Defaults 0.3, 64, 1.5. There is no queue and no refusal unless
    the number of concurrent requests is bounded (``--max-concurrent-requests``), which it is not, or not below 32,768.
    To tune: threshold, abs and rel.
    """

    tree: Tree

    def __init__(self, context: PolicyContext, threshold: float = 0.3, abs_: float = 64, rel: float = 1.5) -> None:
        super().__init__(context)
        self._threshold = threshold
        self._abs = abs_
        self._rel = rel
        self._trees: dict[WorkerId, RoutedPrompts] = {}
        self._trimmed_at = 0.0

    def place(self, request: PlacementRequest, now: float) -> Placement | Rejection:
        """Its trees are trimmed now and then."""
        if now - self._trimmed_at >= self.tree.trimmed_every_s:
            self._trimmed_at = now
            for tree in self._trees.values():
                tree.trim(self.tree.characters_max // CHARACTERS_PER_TOKEN // self.profile.block_tokens)
        return super().place(request, now)

    def choose(
        self, request: PlacementRequest, workers: Sequence[WorkerView], matches: dict[WorkerId, int]
    ) -> WorkerView:
        """Balance first, then the cache."""
        loads = [self.active(view).requests for view in workers]
        smallest, largest = min(loads), max(loads)
        if largest - smallest > self._abs and largest > self._rel * smallest:
            return self.least_loaded(workers, loads)
        return self.by_cache(request, workers, loads, matches)

    def by_cache(
        self, request: PlacementRequest, workers: Sequence[WorkerView], loads: list[int], matches: dict[WorkerId, int]
    ) -> WorkerView:
        """The worker that was sent most of this prompt, if that is enough."""
        depths = [self._depth(view, request.hashes) for view in workers]
        deepest = max(depths)
        if deepest * self.profile.block_tokens > self._threshold * request.prompt_tokens:
            return self.least(workers, [-depth for depth in depths])
        return self.least_loaded(workers, loads)

    def least_loaded(self, workers: Sequence[WorkerView], loads: list[int]) -> WorkerView:
        """The first of those with the fewest requests in flight."""
        return self._first_of(workers, loads)

    def _first_of(self, workers: Sequence[WorkerView], costs: Sequence[Any]) -> WorkerView:
        smallest = min(costs)
        self.equals = [view for view, cost in zip(workers, costs, strict=True) if cost == smallest]
        return self.equals[0]

    def routed(self, request: PlacementRequest, chosen: WorkerView) -> None:
        """Remember the prompt."""
        self._trees.setdefault(chosen.record.worker_id, RoutedPrompts()).add(request.hashes)

    def _depth(self, view: WorkerView, hashes: Sequence[int]) -> int:
        tree = self._trees.get(view.record.worker_id)
        return tree.depth(hashes) if tree is not None else 0


class VllmRouter(CacheAware):
    """vLLM's router (vllm-project/router, ``src/policies/cache_aware.rs``; vllm-router 0.1.17): a fork of SGLang's with
    the same rule and defaults; of equally loaded workers it takes the first.
    """

    tree = VLLM_TREE


class SglangCacheAware(CacheAware):
    """SGLang's gateway (lightseekorg/smg 73da68c, ``model_gateway/src/policies/cache_aware.rs``; sglang-router 0.3.2).
    Of equally loaded workers it takes the one that it has sent the fewest requests, then the first (since June 2026).
    """

    tree = SGLANG_TREE

    def __init__(self, context: PolicyContext, threshold: float = 0.3, abs_: float = 64, rel: float = 1.5) -> None:
        super().__init__(context, threshold, abs_, rel)
        self._sent: Counter[WorkerId] = Counter()

    def least_loaded(self, workers: Sequence[WorkerView], loads: list[int]) -> WorkerView:
        """By requests in flight, then by requests sent."""
        sent = [self._sent[view.record.worker_id] for view in workers]
        return self._first_of(workers, list(zip(loads, sent, strict=True)))

    def routed(self, request: PlacementRequest, chosen: WorkerView) -> None:
        """Count it, too."""
        self._sent[chosen.record.worker_id] += 1
        super().routed(request, chosen)


class SglangExact(SglangCacheAware):
    """The same for engines that tell KV events: the largest overlap by the prefix index instead of the tree, at any
    length; equal overlaps go to the less loaded worker, requests without any to the least loaded. No threshold.
    """

    def __init__(self, context: PolicyContext, abs_: float = 64, rel: float = 1.5) -> None:
        super().__init__(context, abs_=abs_, rel=rel)

    def by_cache(
        self, request: PlacementRequest, workers: Sequence[WorkerView], loads: list[int], matches: dict[WorkerId, int]
    ) -> WorkerView:
        """The largest overlap."""
        overlaps = [matches.get(view.record.worker_id, 0) for view in workers]
        most = max(overlaps)
        if not most:
            return self.least_loaded(workers, loads)
        tied = [(load, view) for load, view, overlap in zip(loads, workers, overlaps, strict=True) if overlap == most]
        return self.least([view for _load, view in tied], [load for load, _view in tied])

    def routed(self, request: PlacementRequest, chosen: WorkerView) -> None:
        """It keeps no tree."""
        self._sent[chosen.record.worker_id] += 1


class ProductionStack(Baseline):
    """vLLM's production stack, ``prefixaware`` (vllm-project/production-stack a6c01db,
    ``src/vllm_router/routers/routing_logic.py`` and ``prefix/hashtrie.py``): a random one of the workers that were sent
    the longest prefix of this prompt, whatever their load; the trie forgets nothing. If that prefix is shorter than
    ``tokens_min`` (``--prefix-min-match-length``, in characters; 0, the default, turns it off): the worker with the
    fewest requests per second, here of the last 60 s (``--request-stats-window``). No queue, no refusal.
    """

    def __init__(self, context: PolicyContext, tokens_min: float = 0) -> None:
        super().__init__(context)
        self._tokens_min = tokens_min
        self._trees: dict[WorkerId, RoutedPrompts] = {}
        self._sent: dict[WorkerId, deque[float]] = {}
        self._now = 0.0

    def place(self, request: PlacementRequest, now: float) -> Placement | Rejection:
        """Requests per second are of a window of time."""
        self._now = now
        return super().place(request, now)

    def choose(
        self, request: PlacementRequest, workers: Sequence[WorkerView], matches: dict[WorkerId, int]
    ) -> WorkerView:
        """The longest prefix."""
        trees = [self._trees.setdefault(view.record.worker_id, RoutedPrompts()) for view in workers]
        depths = [tree.depth(request.hashes) for tree in trees]
        if max(depths) * self.profile.block_tokens < self._tokens_min:
            return self.least(workers, [self._recent(view) for view in workers])
        return self.least(workers, [-depth for depth in depths])

    def routed(self, request: PlacementRequest, chosen: WorkerView) -> None:
        """Remember the prompt, and when it was sent."""
        self._trees.setdefault(chosen.record.worker_id, RoutedPrompts()).add(request.hashes)
        self._sent.setdefault(chosen.record.worker_id, deque()).append(self._now)

    def _recent(self, view: WorkerView) -> int:
        sent = self._sent.get(view.record.worker_id, deque())
        while sent and sent[0] < self._now - STATS_WINDOW_S:
            sent.popleft()
        return len(sent)
