"""Chooses the workers of the fleet for a request: the pair with the smallest predicted cost, or one for all of it."""

from __future__ import annotations

import math
from typing import Final, Protocol

import msgspec
import numpy as np

from services.router.placement.assembly import on_one, on_two
from services.router.placement.candidates import Candidate, Candidates
from services.router.placement.kv_sources import PrefixDepths, named_sources, source_of
from services.router.placement.native import IS_COMPILED, placement_of
from services.router.placement.placement import (
    Placement,
    PlacementPolicy,
    PlacementRequest,
    Rejection,
    reject,
    reject_pair,
)
from services.router.placement.specification import (
    HIT_THRESHOLD,
    MAY_DECODE_FIRST,
    MODES,
    PREFILL_NAMED,
    SHORT,
    STREAMS,
    UNSPLITTABLE,
    Asked,
    tokens_out_expected,
    work_s,
)
from services.router.state import fleet_table as t
from services.router.state.cluster_view import ClusterView
from services.router.state.prefix_index import PrefixIndex
from services.router.state.revision_names import ANY
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import KvSource
from shared.contracts.workers import Role

TOKENS_MAX: Final = 1 << 53
"""The largest number that C is asked about: all integers up to it are floats, too."""


class Placer(Protocol):
    """A placement policy. Its constructor takes the fleet's view; it may remember what it chose."""

    def place(self, request: PlacementRequest, now: float) -> Placement | Rejection:
        """Choose with what is known at ``now`` (seconds, monotonic)."""


class CostPlacer:
    """Minimises the predicted cost in seconds: the request's own time, and what it adds to that of others."""

    def __init__(
        self, cluster: ClusterView, index: PrefixIndex, policy: PlacementPolicy, *, compiled: bool = IS_COMPILED
    ) -> None:
        """``compiled``: weigh the workers in C, which gives the same choices."""
        self._cluster = cluster
        self._depths = PrefixDepths(cluster, index)
        self._policy = policy
        self._compiled = compiled
        self._open()

    def place(self, request: PlacementRequest, now: float) -> Placement | Rejection:
        """Notes which workers it chose, so that equal workers take turns. A revision whose workers cannot serve the
        request is skipped.
        """
        cluster = self._cluster
        if self._numbers is not cluster.table.numbers:
            self._open()
        free = self._find_free(request, now)
        if free <= 0:
            return reject(request, cluster, busy=free == 0)
        hashes = request.hashes
        asked, groups = self._question(request, now, free), cluster.groups(request.model)
        depths = self._depths.by_slot(request) if hashes else None
        slots = self._depths.slots() if hashes else None
        choice = self._form.choose(asked, groups, depths, slots, None, cluster.views)
        if choice is None:
            in_use = cluster.in_use(hashes, request.prompt_tokens + tokens_out_expected(request.tokens_out))
            choice = self._form.choose(asked, groups, depths, slots, in_use, cluster.views)
        if choice is None or isinstance(choice, bool):
            if not choice and len(request.revisions) > 1:
                return self.place(msgspec.structs.replace(request, revisions=request.revisions[1:]), now)
            return reject_pair(request, busy=bool(choice))
        candidates = Candidates(choice, free)
        prefilling, decoding = candidates.chosen()
        sources, further = self._sources(request, prefilling or decoding, candidates.holders)
        step_s = (
            0.0 if request.targets.itl_s == math.inf else cluster.table.prompt_step_s((prefilling or decoding).view.row)
        )
        if prefilling is None:
            cluster.picked(decoding.view)
            return on_one(request, candidates, decoding, sources, further, self._policy, step_s)
        cluster.picked(prefilling.view, decoding.view)
        return on_two(request, candidates, prefilling, decoding, sources, further, self._policy, step_s)

    def _open(self) -> None:
        """The fleet table has other arrays since it has grown."""
        table = self._cluster.table
        self._numbers = table.numbers
        self._able: t.Bools = np.zeros(len(table.groups), dtype=np.bool_)
        """The rows that may be asked for KV."""
        self._form = placement_of(table, self._able, compiled=self._compiled)

    def _find_free(self, request: PlacementRequest, now: float) -> int:
        """How many workers are free of the first of the request's revisions that has any worker that could serve it,
        full or not; -1 when none has.
        """
        cluster, forced, free = self._cluster, request.forced, -1
        allowed = may_prefill = may_answer = None
        if request.excluded:
            allowed = ~self._mask(*request.excluded)
        if forced is not None:
            may_prefill = self._mask(forced.prefill_worker) if forced.prefill_worker else None
            may_answer = self._mask(forced.decode_worker) if forced.decode_worker else None
        heard_min = now - self._policy.silent_s_max
        for revision in request.revisions or (ANY,):
            offering = cluster.mask(request.model, revision)
            free = self._form.fit(cluster.table.count, offering, allowed, may_prefill, may_answer, heard_min)
            if free >= 0:
                break
        return free

    def _mask(self, *worker_ids: WorkerId) -> t.Bools:
        """The rows of these workers."""
        mask: t.Bools = np.zeros(self._cluster.table.count, dtype=np.bool_)
        views = [self._cluster.workers.get(worker_id) for worker_id in worker_ids]
        mask[[view.row for view in views if view is not None]] = True
        return mask

    def _question(self, request: PlacementRequest, now: float, free: int) -> Asked:
        policy, forced = self._policy, request.forced
        options = STREAMS if 0 <= policy.stream_tokens_min <= request.prompt_tokens else 0
        if request.unsplittable:
            options |= UNSPLITTABLE
        if request.cache_hit_threshold is not None:
            options |= HIT_THRESHOLD
        if request.may_decode_first:
            options |= MAY_DECODE_FIRST
        if forced is not None and forced.prefill_worker:
            options |= PREFILL_NAMED
        if free > policy.weighed_max:
            options |= SHORT
        return (
            request.prompt_tokens,
            tokens_out_expected(request.tokens_out),
            self._fetch_tokens_min(request),
            now,
            request.targets.ttft_s,
            request.targets.itl_s,
            policy.tie_s,
            policy.decode_first_share_min,
            MODES[request.mode],
            options,
        )

    def _fetch_tokens_min(self, request: PlacementRequest) -> int:
        least = self._policy.fetch_tokens_min if request.fetch_tokens_min is None else request.fetch_tokens_min
        return 1 if least < 1 else min(TOKENS_MAX, least)

    def _sources(
        self, request: PlacementRequest, computing: Candidate, holders: tuple[tuple[int, int], ...]
    ) -> tuple[list[KvSource], list[KvSource]]:
        """The workers to ask for what the candidate fetches, and those to ask for blocks after that."""
        cluster, forced, view = self._cluster, request.forced, computing.view
        if forced is not None and forced.sources is not None:
            # A request that cannot be split may need its prompt computed, as for the prompt's log probabilities.
            named = () if request.unsplittable else forced.sources
            return named_sources(named, view, cluster, self._able), []
        if not computing.estimate.fetched:
            return [], []
        of = computing.estimate
        first = of.cached // view.record.hashing.block_size
        computing_s = work_s(cluster.table.of(view.row), of.fetched, of.cached)
        holding = [(cluster.views[row], end) for row, end in holders]
        sources = [
            source_of(holder, first=first, end=end, worth_s=computing_s if holder.record.role is Role.STORE else 0.0)
            for holder, end in holding
            if holder is not None
        ]
        able = self._able[: cluster.table.count]
        return sources, self._depths.further_sources(request, computing, able, self._fetch_tokens_min(request))
