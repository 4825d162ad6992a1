"""One placement from the moment it is made until its attempt ends: what was asked, what was chosen, what came of it.

A request pays only for references and a few numbers; the wire message is rendered when it is requested, which
hardly ever happens. ``python -m bench.bench_explain`` measures both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from math import inf
from operator import methodcaller
from typing import Final

from msgspec.structs import replace

from services.router.decisions.decision_filter import DecisionFilter
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.request.timings import total_s
from shared.contracts.decisions import CandidateRecord, DecisionRecord, Part, PrefetchRecord, TtftParts
from shared.contracts.ids import DecisionId, RequestId, RouterId, WorkerId
from shared.contracts.inference import LegReport

BASE_BYTES: Final = 2500
"""The memory, about, of one decision apart from its candidates."""
CANDIDATE_BYTES: Final = 350
"""The memory, about, of each candidate that a decision keeps."""
CANDIDATES_KEPT_MAX: Final = 24
CANDIDATES_SHOWN_MAX: Final = 8
"""Candidates in a record, for each part of the request."""
UNKNOWN: Final = -1.0


class Decision:
    """What placement was asked, what it answered, and what came of the attempt."""

    outcome = ""
    """``ok``, or the reason that ended the attempt; empty while it runs."""
    measured: TtftParts | None = None
    ttft_s = -1.0
    """Seconds from the request to its first token; -1, here and below: not known."""
    itl_s = -1.0
    ttft_probability = -1.0
    itl_probability = -1.0
    counted_prompt_tokens = -1
    cached_tokens = -1
    recompute_slowed_s = -1.0
    drafts = (0, 0)
    """Tokens that the drafter proposed, and that the model agreed with."""
    threshold = -1.0
    """The share of the prompt below which the worker refuses; -1: none. ``threshold_from``: see ``DecisionRecord``."""
    threshold_from = ""
    hit_share = -1.0
    gap_worker = WorkerId("")
    gap_step_s = 0.0
    prefetch: PrefetchRecord | None = None
    answered = False
    """The client has its response; the report of another leg may be missing."""
    on_end: tuple[Callable[[], None], ...] = ()
    """Called when the decision ends."""

    def __init__(  # noqa: PLR0913  # the record's fields
        self,
        *,
        decision_id: DecisionId,
        request_id: RequestId,
        request: PlacementRequest,
        result: Placement | Rejection,
        exact: bool,
        why_inexact: str,
        at_unix_s: float,
        attempt: int,
        earlier: DecisionId,
    ) -> None:
        """``exact``: whether the prompt was tokenized as the engine does. ``earlier``: the decision of the attempt
        before this one, which failed; empty for the first attempt.
        """
        self.decision_id = decision_id
        self.request_id = request_id
        self.request = replace(request, hashes=())
        """What placement was asked, without the block hashes: they may take hundreds of kilobytes."""
        self.exact = exact
        self.why_inexact = why_inexact
        self.at_unix_s = at_unix_s
        self.attempt = attempt
        self.earlier = earlier
        self.result = result

    def end(
        self,
        outcome: str,
        *,
        measured: TtftParts | None = None,
        ttft_s: float = UNKNOWN,
        itl_s: float = UNKNOWN,
        prompt_tokens: int = -1,
        cached_tokens: int = -1,
        recompute_slowed_s: float = UNKNOWN,
    ) -> None:
        """The attempt is over."""
        self.outcome = outcome
        self.measured = measured
        self.ttft_s = ttft_s
        self.itl_s = itl_s
        self.counted_prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.recompute_slowed_s = recompute_slowed_s
        waiting, self.on_end = self.on_end, ()
        for call in waiting:
            call()

    def note_hit_share(self, report: LegReport | None) -> None:
        """What the leg that has a threshold reports of its prompt."""
        if self.threshold < 0 or report is None:
            return
        if report.kv is not None and report.kv.refused:
            self.hit_share = min(1.0, max(0.0, report.kv.hit_share))
        elif report.prompt_tokens > 0:
            found = report.cached_tokens + report.received_tokens
            self.hit_share = min(1.0, max(0.0, found / report.prompt_tokens))

    @property
    def bytes(self) -> int:
        """The memory that the decision takes, about."""
        considered = self.result.considered if isinstance(self.result, Placement) else 0
        return BASE_BYTES + min(considered, CANDIDATES_KEPT_MAX) * CANDIDATE_BYTES

    @property
    def workers(self) -> tuple[str, str]:
        """Prefill and decode worker; empty where there is none."""
        result = self.result
        if isinstance(result, Rejection):
            return "", ""
        prefill = result.prefill.record.worker_id if result.prefill is not None else ""
        return prefill, result.decode.record.worker_id

    @property
    def ttft_target_s(self) -> float:
        return self.request.targets.ttft_s if self.request.targets.ttft_s < inf else UNKNOWN

    @property
    def itl_target_s(self) -> float:
        return self.request.targets.itl_s if self.request.targets.itl_s < inf else UNKNOWN

    @property
    def missed_target(self) -> bool:
        return self.ttft_s > self.request.targets.ttft_s or self.itl_s > self.request.targets.itl_s

    def record(self, router_id: RouterId, *, with_candidates: bool = True) -> DecisionRecord:
        """The wire message."""
        result = self.result
        placement = result if isinstance(result, Placement) else None
        candidates = self._candidates(placement) if placement is not None else []
        prefill_worker, decode_worker = self.workers
        predicted = placement.predicted if placement is not None else TtftParts()
        return DecisionRecord(
            decision_id=self.decision_id,
            router_id=router_id,
            request_id=self.request_id,
            at_unix_s=self.at_unix_s,
            model=self.request.model or (placement.decode.record.model if placement is not None else ""),
            mode=placement.mode.value if placement is not None else "",
            reason=result.why if isinstance(result, Placement) else result.message,
            attempt=self.attempt,
            earlier=self.earlier,
            prompt_tokens=self.request.prompt_tokens,
            counted_prompt_tokens=self.counted_prompt_tokens,
            exact=self.exact,
            why_inexact=self.why_inexact,
            tenant=self.request.tenant,
            priority=self.request.priority,
            ttft_target_s=self.ttft_target_s,
            itl_target_s=self.itl_target_s,
            considered=placement.considered if placement is not None else 0,
            candidates=candidates if with_candidates else [],
            prefill_worker=prefill_worker,
            decode_worker=decode_worker,
            sources=list(placement.sources) if placement is not None else [],
            predicted=predicted,
            predicted_itl_s=placement.predicted_itl_s if placement is not None else UNKNOWN,
            ttft_probability=self.ttft_probability,
            itl_probability=self.itl_probability,
            measured=self.measured,
            ttft_s=self.ttft_s,
            itl_s=self.itl_s,
            predicted_cached_tokens=placement.cached_tokens if placement is not None and self.exact else -1,
            cached_tokens=self.cached_tokens,
            recompute_slowed_s=self.recompute_slowed_s,
            drafted_tokens=self.drafts[0],
            accepted_tokens=self.drafts[1],
            cache_hit_threshold=self.threshold,
            threshold_from=self.threshold_from,
            hit_share=self.hit_share,
            gap_worker=self.gap_worker,
            gap_step_s=self.gap_step_s,
            regret_s=regret_s(predicted, self.measured, candidates),
            prefetch=self.prefetch,
            outcome=self.outcome,
        )

    def _candidates(self, placement: Placement) -> list[CandidateRecord]:
        """The cheapest of each part, in order of cost; the chosen one is among them."""
        records: list[CandidateRecord] = []
        for part, candidates, chosen in placement.candidates:
            ranked = sorted(candidates, key=methodcaller("cost_s", part))
            best = ranked[:CANDIDATES_SHOWN_MAX]
            if chosen in ranked[CANDIDATES_SHOWN_MAX:]:
                best[-1:] = [chosen]
            records += [one.record(part, self.request.targets, chosen=one is chosen) for one in best]
        return records


def regret_s(predicted: TtftParts, measured: TtftParts | None, candidates: list[CandidateRecord]) -> float:
    """How far the measured time to the first token exceeds the best prediction for another choice of workers.

    What the router itself spent before the legs would have been the same whatever was chosen; it is taken as measured.
    0 when no other choice was predicted to be faster; -1 while nothing is measured.
    """
    if measured is None:
        return UNKNOWN
    best_s = best_other_s(candidates, handoff_counts=predicted.handoff_s > 0.0)
    if best_s == inf:
        return 0.0
    return max(0.0, placed_s(measured) - best_s)


def placed_s(measured: TtftParts) -> float:
    """The time from the placement to the first token."""
    before_s = measured.admission_s + measured.tokenize_s + measured.place_s + measured.failed_s
    return total_s(measured) - before_s


def best_other_s(candidates: list[CandidateRecord], *, handoff_counts: bool = True) -> float:
    """The least time to the first token that was predicted for other workers than the chosen ones, without the router's
    own share; infinite when there was no other choice. ``handoff_counts``: a pair's first token waits for the handoff.
    """
    if not handoff_counts:
        candidates = [replace(one, handoff_s=0.0, decode_prefill_s=0.0) for one in candidates]
    prefills, decodes, wholes = ([one for one in candidates if one.part is part] for part in Part)
    chosen_prefill, chosen_decode = _least(prefills, chosen=True), _least(decodes, chosen=True)
    pairs = (
        (_least(prefills, chosen=False) + chosen_decode, chosen_prefill + _least(decodes, chosen=False))
        if chosen_prefill + chosen_decode < inf
        else (_least(prefills) + _least(decodes),)
    )
    return min(*pairs, _least(wholes, chosen=False))


def _least(candidates: Iterable[CandidateRecord], *, chosen: bool | None = None) -> float:
    """The shortest predicted contribution to the time to the first token."""
    return min(
        (
            one.queue_s + one.fetch_s + one.prefill_s + one.handoff_s + one.decode_prefill_s + one.front_end_and_bus_s
            for one in candidates
            if chosen is None or one.chosen is chosen
        ),
        default=inf,
    )


LISTED_MAX: Final = 100
"""Decisions in one list."""


class DecisionLog:
    """The newest decisions of this router, of about ``bytes_max`` bytes together."""

    def __init__(
        self, router_id: RouterId, random_hex: Callable[[], str], catch_up: Callable[[], None], *, bytes_max: int
    ) -> None:
        """``random_hex`` returns 128 random bits as 32 digits. ``catch_up`` ends those of ended requests."""
        self._router_id = router_id
        self._catch_up = catch_up
        self._random_hex = random_hex
        self._bytes_max = bytes_max
        self._decisions: deque[Decision] = deque()
        self._by_id: dict[str, Decision] = {}
        self.bytes_held = 0

    def __len__(self) -> int:
        return len(self._decisions)

    def add(  # noqa: PLR0913  # the record's fields
        self,
        request_id: RequestId,
        request: PlacementRequest,
        result: Placement | Rejection,
        *,
        at_unix_s: float,
        attempt: int = 1,
        exact: bool = False,
        why_inexact: str = "",
        earlier: Decision | None = None,
    ) -> Decision:
        """A request was placed or rejected, after an ``earlier`` attempt that failed. The caller ends the decision."""
        decision = Decision(
            decision_id=DecisionId(f"{self._router_id}-d{self._random_hex()}"),
            request_id=request_id,
            request=request,
            result=result,
            exact=exact,
            why_inexact=why_inexact,
            at_unix_s=at_unix_s,
            attempt=attempt,
            earlier=earlier.decision_id if earlier is not None else DecisionId(""),
        )
        self._decisions.append(decision)
        self._by_id[decision.decision_id] = decision
        self.bytes_held += decision.bytes
        self._drop_oldest()
        return decision

    def _drop_oldest(self) -> None:
        while self.bytes_held > self._bytes_max:
            oldest = self._decisions.popleft()
            del self._by_id[oldest.decision_id]
            self.bytes_held -= oldest.bytes

    def find(self, decision_id: str, tenant: str | None = None) -> DecisionRecord | None:
        """None: this router never made it, has dropped it, or it is another tenant's."""
        self._catch_up()
        decision = self._by_id.get(decision_id)
        if decision is None or tenant not in (None, decision.request.tenant):
            return None
        return decision.record(self._router_id)

    def ending(self, decision_id: str, tenant: str | None) -> Decision | None:
        """The decision that ``find`` finds, if its client has its response and its last leg has not reported yet."""
        self._catch_up()
        decision = self._by_id.get(decision_id)
        if decision is None or tenant not in (None, decision.request.tenant):
            return None
        return decision if decision.answered and not decision.outcome else None

    def newest_first(self) -> list[Decision]:
        """All decisions at this moment."""
        self._catch_up()
        return list(reversed(self._decisions))

    def listed(
        self, wanted: DecisionFilter, among: Iterable[Decision] | None = None, *, with_candidates: bool = False
    ) -> list[DecisionRecord]:
        """Those that match, newest first; ``among`` is a part of ``newest_first``."""
        limit = max(0, min(wanted.limit, LISTED_MAX))
        found = filter(wanted.matches, self.newest_first() if among is None else among)
        return [one.record(self._router_id, with_candidates=with_candidates) for one in islice(found, limit)]
