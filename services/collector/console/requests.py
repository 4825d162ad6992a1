"""The newest requests as the console lists them, and which of them were slow."""

from __future__ import annotations

from collections import deque

from services.collector.console.views import PartTime, RequestRow
from shared.contracts.decisions import TtftParts
from shared.contracts.inference import RequestFinished
from shared.text.explanation import PART_NAMES

REQUESTS_MAX = 200
SAMPLES_MAX = 64
"""Of each model, so many times to the first token say what is usual."""
SAMPLES_MIN = 16
SORTED_EVERY = 8
"""Requests between two looks at what is usual."""
MODELS_MAX = 64
SLOW_RATIO = 3.0
"""Without a target, a request is slow when its first token took so many times what is usual."""


class Usual:
    """What is usual of one model: the median of the newest times to the first token."""

    __slots__ = ("_median_s", "_seen", "_times_s")

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._seen = 0
        self._median_s = 0.0

    def is_exceeded(self, ttft_s: float) -> bool:
        """Whether that was far more; then it is added."""
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
        self._usual: dict[str, Usual] = {}

    def add(self, told: RequestFinished, at: float) -> RequestRow:
        """One more has ended."""
        row = row_of(told, at, slow=self._is_slow(told))
        self._rows.appendleft(row)
        return row

    def rows(self) -> list[RequestRow]:
        """The newest first."""
        return list(self._rows)

    def find(self, decision_id: str) -> RequestRow | None:
        """The one that was placed by this decision, if it is among them."""
        return next((row for row in self._rows if row.decision_id == decision_id), None)

    def _is_slow(self, told: RequestFinished) -> bool:
        if told.ttft_s < 0:
            return False
        usual = self._usual.get(told.model)
        if usual is None:
            usual = Usual()
            if len(self._usual) < MODELS_MAX:
                self._usual[told.model] = usual
        far_more = usual.is_exceeded(told.ttft_s)
        if told.ttft_target_s >= 0 or told.itl_target_s >= 0:
            return missed_target(told)
        return far_more


def missed_target(told: RequestFinished) -> bool:
    """Whether it took longer than it was to take."""
    return 0 <= told.ttft_target_s < told.ttft_s or 0 <= told.itl_target_s < told.itl_s


def row_of(told: RequestFinished, at: float, *, slow: bool) -> RequestRow:
    """One request as the page lists it."""
    return RequestRow(
        id=told.request_id,
        trace_id=told.trace_id,
        decision_id=told.decision_id,
        ended_at=round(at, 3),
        tenant=told.tenant,
        model=told.model,
        mode=told.mode,
        status=told.status,
        reason=told.reason,
        prompt_tokens=_count(told.prompt_tokens),
        cached_tokens=_count(told.cached_tokens),
        fetched_tokens=_count(told.readback_tokens),
        received_tokens=_count(told.received_tokens),
        received_bytes=told.received_bytes,
        tokens_out=_count(told.completion_tokens),
        ttft_s=_seconds(told.ttft_s),
        total_s=_seconds(told.e2e_s),
        itl_s=_seconds(told.itl_s),
        ttft_target_s=_seconds(told.ttft_target_s),
        itl_target_s=_seconds(told.itl_target_s),
        prefill_worker=told.prefill_worker,
        decode_worker=told.decode_worker,
        attempts=told.attempts,
        resumes=told.resumes,
        slow=slow,
        streamed_handoff=told.streamed_handoff,
        parts=parts_of(told.ttft_parts),
    )


def parts_of(parts: TtftParts | None) -> list[PartTime]:
    """Those that took any time."""
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
