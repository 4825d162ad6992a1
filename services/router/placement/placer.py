"""Chooses the workers of the fleet for a request: the pair with the smallest predicted cost, or one for all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from services.router.placement.assembly import (
    APART,
    ASKED_FOR,
    BEST_FOR_BOTH,
    ROLE_MISSING,
    Selected,
    assemble,
    further_sources,
)
from services.router.placement.compiled import IS_COMPILED, CompiledSelection
from services.router.placement.evaluation import Evaluation, fit_rows
from services.router.placement.kv_sources import source_of
from services.router.placement.placement import (
    Placement,
    PlacementPolicy,
    PlacementRequest,
    Rejection,
    reject,
    reject_pair,
)
from services.router.placement.shortlist import Candidate, PartCandidates, PrefixDepths
from services.router.request.facts import Mode
from services.router.state.cluster_view import ClusterView
from services.router.state.prefix_index import PrefixIndex
from services.router.state.worker_view import can_exchange_kv
from shared.contracts.decisions import Part
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import KvSource
from shared.contracts.workers import Role

HIT_SHARE_OF_DECODE_FIRST: Final = 0.5
"""A decode worker is asked to serve a request alone if the router expects it to have this share of the prompt."""


class Placer(Protocol):
    """A placement policy. Its constructor takes the fleet's view; it may remember what it chose."""

    def place(self, request: PlacementRequest, now: float) -> Placement | Rejection:
        """Choose with what is known at ``now`` (seconds, monotonic)."""


class CostPlacer:
    """Minimises the predicted cost in seconds: the request's own time, and what it adds to that of others."""

    def __init__(
        self, cluster: ClusterView, index: PrefixIndex, policy: PlacementPolicy, *, compiled: bool = IS_COMPILED
    ) -> None:
        """``compiled``: select in C, which gives the same results."""
        self._cluster = cluster
        self._depths = PrefixDepths(cluster, index)
        self._policy = policy
        self._compiled = CompiledSelection(cluster, self._depths, policy) if compiled else None

    def place(self, request: PlacementRequest, now: float) -> Placement | Rejection:
        """Notes which workers it chose, so that equal workers take turns. A revision whose workers cannot serve the
        request is skipped.
        """
        result = self._select(request, now)
        if isinstance(result, Selected):
            return assemble(request, result, self._cluster, self._policy)
        if result.reason is Reason.NO_WORKER and len(request.revisions) > 1:
            return self.place(msgspec.structs.replace(request, revisions=request.revisions[1:]), now)
        return result

    def _select(self, request: PlacementRequest, now: float) -> Selected | Rejection:
        if self._compiled is not None and request.forced is None:
            return self._compiled.select(request, now)
        evaluation = Evaluation(request, self._cluster, self._depths, self._policy, now)
        if not evaluation.count:
            fit = fit_rows(request, self._cluster, self._policy, now)
            return reject(request, self._cluster, busy=bool(fit.any()))
        return Selection(evaluation, self._cluster).result()


class Selection:
    """Selects among the candidates of one request."""

    def __init__(self, evaluation: Evaluation, cluster: ClusterView) -> None:
        self._evaluation = evaluation
        self._request = evaluation.request
        self._cluster = cluster
        forced = evaluation.request.forced
        self._forced_prefill = forced.prefill_worker if forced is not None else WorkerId("")
        self._forced_decode = forced.decode_worker if forced is not None else WorkerId("")
        self._wholes: Sequence[Candidate] = ()
        """Candidates for the whole request, where they were compared with a pair."""
        self._prefills: Sequence[Candidate] = ()
        self._decodes: Sequence[Candidate] = ()
        self._has_pair = False

    def result(self) -> Selected | Rejection:
        """The cheapest of what the request allows."""
        request, evaluation = self._request, self._evaluation
        if request.unsplittable or request.mode is Mode.AGGREGATED:
            return self._any_role(request.unsplittable or ASKED_FOR)
        self._prefills = list(filter(self._may_prefill, evaluation.candidates))
        self._decodes = list(filter(self._may_decode, evaluation.candidates))
        wholes = [] if self._forced_prefill else [one for one in self._decodes if self._may_serve_alone(one)]
        pair = evaluation.cheapest_pair(self._prefills, self._decodes)
        self._wholes = wholes
        self._has_pair = pair is not None
        whole = evaluation.cheapest(Part.WHOLE, wholes) if request.mode is not Mode.DISAGGREGATED else None
        if request.mode is Mode.DECODE_FIRST and whole is not None:
            return self._one(whole, wholes, ASKED_FOR)
        if pair is not None and not self._keep_on_one(pair, whole):
            pair_s = pair[0].cost.prefill_s + pair[1].cost.decode_s
            if whole is None or pair_s < whole.cost.whole_s:
                return self._two(*pair)
        if whole is not None:
            return self._one(whole, wholes, BEST_FOR_BOTH)
        if request.mode is Mode.DISAGGREGATED or self._forced_prefill:
            return reject_pair(request, busy=self._is_full())
        return self._any_role(ROLE_MISSING)

    def _keep_on_one(self, pair: tuple[Candidate, Candidate], whole: Candidate | None) -> bool:
        """Two workers of role BOTH would hold the prompt's KV twice, which no predicted time accounts for. Such a pair
        is taken only where a single worker would miss the targets.
        """
        both = pair[0].view.record.role is Role.BOTH and pair[1].view.record.role is Role.BOTH
        auto = self._request.mode is Mode.AUTO and not self._forced_prefill
        return auto and both and whole is not None and whole.meets(self._request.targets, Part.WHOLE)

    def _may_prefill(self, candidate: Candidate) -> bool:
        named = self._forced_prefill in ("", candidate.view.record.worker_id)
        return named and candidate.view.record.role is not Role.DECODE

    def _may_generate(self, candidate: Candidate) -> bool:
        return self._forced_decode in ("", candidate.view.record.worker_id)

    def _may_decode(self, candidate: Candidate) -> bool:
        return self._may_generate(candidate) and candidate.view.record.role is not Role.PREFILL

    def _may_serve_alone(self, candidate: Candidate) -> bool:
        """Workers of role BOTH may serve the request without a prefill worker, and so may decode workers that have most
        of the prompt.
        """
        request, record, prefill = self._request, candidate.view.record, candidate.prefill
        if record.attached:
            return request.mode is not Mode.DECODE_FIRST
        if request.mode is not Mode.DECODE_FIRST:
            if record.role is Role.BOTH:
                return True
            if request.cache_hit_threshold is not None:
                return False
        most = prefill.cached + prefill.fetched >= HIT_SHARE_OF_DECODE_FIRST * request.prompt_tokens
        return bool(
            request.may_decode_first
            and most
            and can_exchange_kv(record)
            and prefill.computed <= max(1, record.step_tokens_max)
        )

    def _any_role(self, why: str) -> Selected | Rejection:
        """One worker for all of it: a prefill worker, too, where there is no other."""
        candidates = self._evaluation.candidates
        among = list(filter(self._may_decode, candidates)) or list(filter(self._may_generate, candidates))
        chosen = self._evaluation.cheapest(Part.WHOLE, among)
        return self._one(chosen, among, why) if chosen else reject_pair(self._request, busy=self._is_full())

    def _is_full(self) -> bool:
        """Whether a worker that could serve the request has no free leg."""
        full, workers = self._evaluation.full, self._cluster.workers
        views = [workers.get(worker_id) for worker_id in (self._forced_prefill, self._forced_decode) if worker_id]
        return any(view is not None and full[view.row] for view in views) if views else bool(full.any())

    def _one(self, chosen: Candidate, among: Sequence[Candidate], why: str) -> Selected:
        pair: tuple[PartCandidates, ...] = self._pair_candidates(None, None) if self._has_pair else ()
        alone = self._may_decode(chosen) and self._may_serve_alone(chosen)
        return self._selected(chosen, None, why, ((Part.WHOLE, among, chosen), *pair), alone=alone)

    def _two(self, prefill: Candidate, decode: Candidate) -> Selected:
        candidates = (*self._pair_candidates(prefill, decode), (Part.WHOLE, self._wholes, None))
        return self._selected(decode, prefill, APART, candidates, alone=False)

    def _pair_candidates(
        self, prefill: Candidate | None, decode: Candidate | None
    ) -> tuple[PartCandidates, PartCandidates]:
        return (Part.PREFILL, self._prefills, prefill), (Part.DECODE, self._decodes, decode)

    def _selected(
        self,
        decode: Candidate,
        prefill: Candidate | None,
        why: str,
        candidates: Sequence[PartCandidates],
        *,
        alone: bool,
    ) -> Selected:
        evaluation, computing = self._evaluation, prefill or decode
        able, tokens_min = (lambda: evaluation.sources), evaluation.holders.tokens_min
        further = further_sources(self._request, computing, self._cluster, evaluation.depths, able, tokens_min)
        sources = self._sources(computing)
        return Selected(decode, prefill, alone, why, evaluation.count, candidates, sources, further)

    def _sources(self, chosen: Candidate) -> list[KvSource]:
        forced, prefill, view = self._request.forced, chosen.prefill, chosen.view
        if forced is not None and forced.sources is not None:
            able = self._evaluation.sources
            named = [self._cluster.workers.get(worker_id) for worker_id in forced.sources]
            others = [holder for holder in named if holder is not None and holder is not view]
            # A source that is lost, silent or excluded would only cost the worker the time that it waits for a reply.
            return [
                source_of(holder)
                for holder in others
                if able is not None and able[holder.row] and holder.pairs_with == view.pairs_with
            ]
        if not prefill.fetched:
            return []
        span = (prefill.cached, prefill.cached + prefill.fetched)
        return self._evaluation.holders.sources(view, self._cluster.views, chosen.group, span)
