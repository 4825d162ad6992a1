"""What the router notes of a request while it runs, to make its spans when it has ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, Self

from shared.bus.leg_inbox import LegFailed
from shared.contracts.ids import LegId, WorkerId
from shared.contracts.inference import LegKind
from shared.telemetry.span_names import SpanName

MARKS_MAX: Final = 64
"""Maximum number of marks of one request; more would not help to explain a request with very many retries."""
PARENT: Final = "traceparent"
STATE: Final = "tracestate"
BAD_VERSION: Final = "ff"
SAMPLED: Final = 1


class Mark(NamedTuple):
    """A span of the router's own work."""

    name: SpanName
    begun_at: float
    ended_at: float


class LegMark(NamedTuple):
    """A leg, from its start to its end as seen by the router."""

    span_id: int
    worker_id: WorkerId
    leg_id: LegId
    kind: LegKind
    begun_at: float
    ended_at: float
    error: str | None


class Trace:
    """A request's place in its trace, and its marks."""

    __slots__ = ("legs", "marks", "parent_id", "sampled", "span_id", "state", "trace_id", "unwanted")

    def __init__(self, trace_id: int, span_id: int, parent_id: int = 0) -> None:
        self.trace_id = trace_id
        self.span_id = span_id
        """Id of the request's own span."""
        self.parent_id = parent_id
        """The client's span; 0: the client has none."""
        self.sampled = False
        """Chosen at the start: the workers export spans of their own."""
        self.unwanted = False
        """The client's context says that it is not sampled."""
        self.state = ""
        self.marks: list[Mark] = []
        self.legs: list[LegMark] = []

    @classmethod
    def below(cls, context: Mapping[str, str], span_id: int) -> Self | None:
        """A trace below the client's span; None when ``context`` is no valid W3C trace context."""
        version, _, ids = context.get(PARENT, "").partition("-")
        trace_id, _, rest = ids.partition("-")
        parent_id, _, flags = rest.partition("-")
        if not flags or version == BAD_VERSION or not (int(trace_id, 16) and int(parent_id, 16)):
            return None
        trace = cls(int(trace_id, 16), span_id, int(parent_id, 16))
        trace.sampled = bool(int(flags, 16) & SAMPLED)
        trace.unwanted = not trace.sampled
        trace.state = context.get(STATE, "")
        return trace

    def mark(self, name: SpanName, begun_at: float, ended_at: float) -> None:
        """Note a span of the router's own work."""
        if len(self.marks) < MARKS_MAX:
            self.marks.append(Mark(name, begun_at, ended_at))

    def headers(self, span_id: int) -> dict[str, str] | None:
        """Headers for a leg's message; ``span_id``: the leg's. None when its worker exports no spans: headers cost
        more on the bus than all notes here.
        """
        if not self.sampled:
            return None
        headers = {PARENT: f"00-{self.trace_id:032x}-{span_id:016x}-01"}
        if self.state:
            headers[STATE] = self.state
        return headers

    def name(self) -> str:
        """The trace id in hexadecimal."""
        return f"{self.trace_id:032x}"


def error_of(error: BaseException) -> str:
    """The span's error type."""
    return str(error.failure.reason) if isinstance(error, LegFailed) else type(error).__name__
