"""Selects workers in C, with the same results as ``Evaluation`` and ``Selection``: the costs, the choice, the sources.

The candidates stay packed until somebody reads them, which is when a decision is explained. ``native/placement.c`` has
the computations. Workers that the client names are left to the Python form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from services.router.placement.assembly import APART, ASKED_FOR, BEST_FOR_BOTH, ROLE_MISSING, Selected, further_sources
from services.router.placement.cost import Cost, DecodeEstimate, PrefillEstimate, tokens_out_expected
from services.router.placement.evaluation import fit_rows, source_rows
from services.router.placement.kv_sources import source_of
from services.router.placement.placement import PlacementPolicy, PlacementRequest, Rejection, reject, reject_pair
from services.router.placement.shortlist import Candidate, PartCandidates, PrefixDepths
from services.router.request.facts import Mode
from services.router.state import fleet_table as t
from services.router.state.block_table import Depths
from services.router.state.cluster_view import ClusterView
from services.router.state.revision_names import ANY
from services.router.state.worker_view import WorkerView
from shared.contracts.decisions import Part
from shared.contracts.kv_exchange import KvSource

try:
    from services.router.native import _placement
except ImportError:
    IS_COMPILED = False
else:
    IS_COMPILED = True

PREFILLS: Final = 1
DECODES: Final = 2
ALONE: Final = 4
"""Roles in it: may prefill, may decode, may serve the request without a prefill worker."""
WHY: Final = (ASKED_FOR, ASKED_FOR, BEST_FOR_BOTH, ROLE_MISSING, APART)
ALONE_WHY: Final = (1, 2)
"""Those of ``WHY`` that select among the workers that may serve alone."""
MODES: Final = {Mode.AUTO: 0, Mode.AGGREGATED: 1, Mode.DISAGGREGATED: 2, Mode.DECODE_FIRST: 3}
STREAMS: Final = 1
UNSPLITTABLE: Final = 2
HIT_THRESHOLD: Final = 4
MAY_DECODE_FIRST: Final = 8

Question = tuple[
    int, int, int, float, float, float, float, int, int, t.Ints | None, Depths | None, t.Ints | None
]  # fmt: skip
"""The first arguments of ``NativePlacement.choose``."""


Choice = tuple[int, int, int, bool, tuple[tuple[int, int], ...], bytes, tuple[WorkerView, ...]]
"""What C returns: the chosen prefill and decode candidate (negative: no prefill worker), the index in ``WHY``, whether
a pair was possible, the sources as row and end, and all candidates: packed, and their views.
"""


class PackedCandidates:
    """What ``Placement.candidates`` says, unpacked each time that it is read."""

    __slots__ = ("_choice",)

    def __init__(self, choice: Choice) -> None:
        self._choice = choice

    def __iter__(self) -> Iterator[PartCandidates]:
        prefill, decode, why, has_pair, _sources, packed, views = self._choice
        unpacked = [unpack(packed, number, view) for number, view in enumerate(views)]
        every = [one for one, _roles in unpacked]

        def having(role: int) -> list[Candidate]:
            return [one for one, roles in unpacked if roles & role]

        chosen = every[decode]
        if prefill >= 0:
            yield Part.PREFILL, having(PREFILLS), every[prefill]
            yield Part.DECODE, having(DECODES), chosen
            yield Part.WHOLE, having(ALONE), None
            return
        yield Part.WHOLE, having(ALONE) if why in ALONE_WHY else having(DECODES) or every, chosen
        if has_pair:
            yield Part.PREFILL, having(PREFILLS), None
            yield Part.DECODE, having(DECODES), None


def unpack(packed: bytes, number: int, view: WorkerView) -> tuple[Candidate, int]:
    """A candidate, and its roles: bits of ``PREFILLS``, ``DECODES`` and ``ALONE``."""
    fields = _placement.unpack(packed, number, PrefillEstimate, DecodeEstimate, Cost)
    roles, group, numbers, prefill, decode, cost = fields
    return Candidate(view, group, numbers, (prefill, decode, cost)), roles


class CompiledSelection:
    """For all requests of one placer."""

    def __init__(self, cluster: ClusterView, depths: PrefixDepths, policy: PlacementPolicy) -> None:
        self._cluster = cluster
        self._depths = depths
        self._policy = policy
        self._open()

    def select(self, request: PlacementRequest, now: float) -> Selected | Rejection:
        """Among the workers of the first of the request's revisions that has any."""
        if self._numbers is not self._cluster.table.numbers:
            self._open()
        free = self._find_free(request, now)
        if free <= 0:
            return reject(request, self._cluster, busy=free == 0)
        question = self._question(request, now)
        chosen = self._native.choose(*question, free > self._policy.weighed_max, self._cluster.views)
        if chosen is None:
            return reject_pair(request, busy=self._native.is_full())
        return self._selected(request, now, free, chosen)

    def _open(self) -> None:
        """The fleet table has other arrays since it has grown."""
        table = self._cluster.table
        self._numbers = table.numbers
        self._free = np.zeros(len(table.groups), dtype=np.bool_)
        self._native = _placement.NativePlacement(table.numbers, table.flags, table.groups, self._free)

    def _find_free(self, request: PlacementRequest, now: float) -> int:
        """How many workers are free, -1 when none could serve the request, full or not."""
        cluster, free = self._cluster, -1
        excluded: tuple[int, ...] = ()
        if request.excluded:
            views = [cluster.workers.get(worker_id) for worker_id in request.excluded]
            excluded = tuple(view.row for view in views if view is not None)
        heard_min = now - self._policy.silent_s_max
        for revision in request.revisions or (ANY,):
            free = self._native.fit(cluster.table.count, cluster.mask(request.model, revision), excluded, heard_min)
            if free >= 0:
                break
        return free

    def _question(self, request: PlacementRequest, now: float) -> Question:
        policy, cluster = self._policy, self._cluster
        groups = cluster.groups(request.model)
        options = STREAMS if 0 <= policy.stream_tokens_min <= request.prompt_tokens else 0
        if request.unsplittable:
            options |= UNSPLITTABLE
        if request.cache_hit_threshold is not None:
            options |= HIT_THRESHOLD
        if request.may_decode_first:
            options |= MAY_DECODE_FIRST
        return (
            request.prompt_tokens,
            tokens_out_expected(request.tokens_out),
            self._fetch_tokens_min(request),
            now,
            request.targets.ttft_s,
            request.targets.itl_s,
            policy.tie_s,
            MODES[request.mode],
            options,
            groups if groups is not cluster.table.groups else None,
            self._depths.by_slot(request.hashes) if request.hashes else None,
            self._depths.slots() if request.hashes else None,
        )

    def _fetch_tokens_min(self, request: PlacementRequest) -> int:
        return self._policy.fetch_tokens_min if request.fetch_tokens_min is None else request.fetch_tokens_min

    def _selected(self, request: PlacementRequest, now: float, considered: int, choice: Choice) -> Selected:
        prefill, decode, why, _has_pair, holders, packed, views = choice
        decoding, roles = unpack(packed, decode, views[decode])
        prefilling = unpack(packed, prefill, views[prefill])[0] if prefill >= 0 else None
        computing = prefilling or decoding
        sources: list[KvSource] = []
        further: list[KvSource] = []
        if computing.prefill.fetched:
            sources = self._sources(computing, holders)
            further = self._further(request, computing, now)
        alone = prefilling is None and bool(roles & ALONE)
        reason = request.unsplittable or ASKED_FOR if why == 0 else WHY[why]
        return Selected(decoding, prefilling, alone, reason, considered, PackedCandidates(choice), sources, further)

    def _sources(self, computing: Candidate, holders: tuple[tuple[int, int], ...]) -> list[KvSource]:
        first = computing.prefill.cached // computing.view.record.hashing.block_size
        views = [(self._cluster.views[row], end) for row, end in holders]
        return [source_of(view, first=first, end=end) for view, end in views if view is not None]

    def _further(self, request: PlacementRequest, computing: Candidate, now: float) -> list[KvSource]:
        cluster, policy = self._cluster, self._policy

        def able() -> t.Bools | None:
            if request.unsplittable:
                return None
            return source_rows(fit_rows(request, cluster, policy, now), request, cluster, policy, now)

        return further_sources(request, computing, cluster, self._depths, able, self._fetch_tokens_min(request))
