"""The console's list of recent requests, which of them were slow, and the decision of one."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from services.collector.console.views import PartTime, RequestRow
from shared.contracts.decisions import DecisionRecord, TtftParts
from shared.contracts.failures import Reason
from shared.contracts.inference import RequestFinished
from shared.contracts.message import in_full
from shared.text import explanation
from shared.text.explanation import PART_NAMES

REQUESTS_MAX = 200
SAMPLES_MAX = 64
"""Times to the first token of each model from which the median is taken."""
SAMPLES_MIN = 16
SORTED_EVERY = 8
"""Requests between two updates of the median."""
MODELS_MAX = 64
SLOW_RATIO = 3.0
"""Without a target, a request is slow when its TTFT exceeds this multiple of the median."""
MEANINGS: Mapping[str, str] = {
    Reason.MODEL_UNKNOWN: "No worker has ever offered that model.",
    Reason.NO_WORKER: "No worker that could have served it was ready.",
    Reason.MODEL_ASLEEP: "The workers of its model slept, and it could not wait until they were awake.",
    Reason.WORKER_DRAINING: "Its worker was draining.",
    Reason.WORKER_BUSY: "Its worker already ran its maximum number of requests.",
    Reason.OVERLOADED: "The admission queue was full, or its wait would have been too long.",
    Reason.OVER_SHARE: "Its tenant already had its share of the queue waiting.",
    Reason.FORBIDDEN: "Its API key does not permit this.",
    Reason.CACHE_MISSED: "Less of its prompt was cached on the worker than predicted.",
    Reason.BELOW_THRESHOLD: "Less of its prompt was cached than its cache_hit_threshold wants.",
    Reason.WORKER_LOST: "Its worker stopped reporting.",
    Reason.ENGINE_DEAD: "Its engine died.",
    Reason.QUARANTINED: "An engine died while it computed the same request shortly before.",
    Reason.FRAMES_LOST: "A message of its response stream was lost.",
    Reason.CANNOT_RESUME: "Its stream broke, and no other worker could resume it.",
    Reason.DEADLINE: "It exceeded its deadline.",
    Reason.TOO_LARGE: "Its body was too large.",
    Reason.BUS_DOWN: "NATS could not be reached.",
    Reason.CLIENT_SLOW: "Its client read too slowly.",
    Reason.CANCELLED: "Its client disconnected.",
    Reason.BAD_MESSAGE: "A message could not be read.",
    Reason.INTERNAL: "A bug: see the logs.",
}
"""What a failure reason means."""


class TtftMedian:
    """The median of one model's newest times to the first token."""

    __slots__ = ("_median_s", "_seen", "_times_s")

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._seen = 0
        self._median_s = 0.0

    def is_exceeded(self, ttft_s: float) -> bool:
        """Whether this TTFT is far above the median; afterwards it is added to the samples."""
        far_more = self._seen >= SAMPLES_MIN and ttft_s > SLOW_RATIO * self._median_s
        self._times_s.append(ttft_s)
        self._seen += 1
        if self._seen % SORTED_EVERY == 0:
            self._median_s = sorted(self._times_s)[len(self._times_s) // 2]
        return far_more


class RecentRequests:
    """At most ``REQUESTS_MAX`` of them."""

    def __init__(self) -> None:
        self._rows: deque[RequestRow] = deque(maxlen=REQUESTS_MAX)
        self._medians: dict[str, TtftMedian] = {}

    def add(self, request: RequestFinished, at: float) -> RequestRow:
        row = row_of(request, at, slow=self._is_slow(request))
        self._rows.appendleft(row)
        return row

    def rows(self) -> list[RequestRow]:
        """The newest first."""
        return list(self._rows)

    def find(self, decision_id: str) -> RequestRow | None:
        """The request that this decision placed, while it is listed."""
        return next((row for row in self._rows if row.decision_id == decision_id), None)

    def _is_slow(self, request: RequestFinished) -> bool:
        if request.ttft_s < 0 or request.is_batch:
            return False
        median = self._medians.get(request.model)
        if median is None:
            median = TtftMedian()
            if len(self._medians) < MODELS_MAX:
                self._medians[request.model] = median
        far_more = median.is_exceeded(request.ttft_s)
        if request.ttft_target_s >= 0 or request.itl_target_s >= 0:
            return missed_target(request)
        return far_more


def missed_target(request: RequestFinished) -> bool:
    """Whether TTFT or ITL exceeded its target."""
    return 0 <= request.ttft_target_s < request.ttft_s or 0 <= request.itl_target_s < request.itl_s


def row_of(request: RequestFinished, at: float, *, slow: bool) -> RequestRow:
    """The page's row for one request. -1 on the wire means not known."""
    return RequestRow(
        id=request.request_id,
        trace_id=request.trace_id,
        decision_id=request.decision_id,
        ended_at=round(at, 3),
        tenant=request.tenant,
        model=request.model,
        mode=request.mode,
        status=request.status,
        reason=request.reason,
        prompt_tokens=_count(request.prompt_tokens),
        cached_tokens=_count(request.cached_tokens),
        fetched_tokens=_count(request.readback_tokens),
        tokens_out=_count(request.completion_tokens),
        ttft_s=_seconds(request.ttft_s),
        total_s=_seconds(request.e2e_s),
        itl_s=_seconds(request.itl_s),
        prefill_worker=request.prefill_worker,
        decode_worker=request.decode_worker,
        attempts=request.attempts,
        resumes=request.resumes,
        is_batch=request.is_batch,
        slow=slow,
        parts=parts_of(request.ttft_parts),
    )


def parts_of(parts: TtftParts | None) -> list[PartTime]:
    """The parts that took any time."""
    if parts is None:
        return []
    times = [(name, float(getattr(parts, name))) for name in TtftParts.__struct_fields__]
    return [
        PartTime(name=part_name(name), label=PART_NAMES[name], seconds=seconds)
        for name, seconds in times
        if seconds > 0
    ]


def part_name(field: str) -> str:
    """``queue_s`` is the part ``queue``."""
    return field.removesuffix("_s")


def _count(number: int) -> int | None:
    return number if number >= 0 else None


def _seconds(number: float) -> float | None:
    return number if number >= 0 else None


def detail_of(row: RequestRow | None, decision: DecisionRecord) -> dict[str, Any]:
    """The data of the page's request panel."""
    content = in_full(decision)
    for candidate, one in zip(decision.candidates, content["candidates"], strict=True):
        one["why"] = explanation.why_not(candidate, explanation.chosen_one(decision, candidate.part))
    content["parts"] = parts_beside(decision.predicted, decision.measured)
    return {"request": row, "decision": content, "text": text_of(decision)}


def parts_beside(predicted: TtftParts, measured: TtftParts | None) -> list[dict[str, Any]]:
    """Each part of the time to the first token, predicted and measured."""
    return [
        {
            "name": part_name(name),
            "label": label,
            "predicted_s": getattr(predicted, name),
            "measured_s": getattr(measured, name) if measured is not None else None,
        }
        for name, label in explanation.PART_NAMES.items()
    ]


def text_of(decision: DecisionRecord) -> dict[str, Any]:
    return {
        "headline": explanation.headline(decision),
        "because": explanation.because(decision),
        "why": decision.reason,
        "ttft": explanation.ttft_text(decision),
        "cached": explanation.cached_text(decision),
        "regret": explanation.regret_text(decision),
        "targets": explanation.target_text(decision),
        "gap": explanation.gap_text(decision),
        "reason": MEANINGS.get(decision.outcome, ""),
    }
