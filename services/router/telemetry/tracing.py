"""One trace per request. While it runs instants are noted; its spans are drawn when it has ended, if anybody is to see
them: a share of all requests, and every one that was slow, failed or went on elsewhere.

The workers of a request that its share has chosen draw their own spans below its legs. For one that turned out odd
the router draws them, from what the workers reported.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import msgspec

from services.router.relay.request_context import RequestContext
from services.router.telemetry.outcome import Kept, kept
from services.router.telemetry.trace import LegMark, Trace, why
from services.router.telemetry.trace_sampling import TraceShare
from services.router.telemetry.trace_spans import new_id, spans_of
from shared.contracts.inference import RequestFinished, StartLeg
from shared.runtime.clock import Clock, SystemClock
from shared.telemetry.finished_spans import SpanSink
from shared.telemetry.log import TRACE_ID
from shared.telemetry.propagation import trace_named

Headers = dict[str, str] | None
TRACE_BITS = 128
TOO_MANY = "too_many"
"""Would have been kept, but there were too many at a time."""
SLOW_S = 2.0
"""What is slow, unless settings say."""


class Tracing:
    """Without a ``sink`` only the client's own trace context is passed on."""

    def __init__(self, sink: SpanSink | None = None, clock: Clock | None = None, *, slow_s: float = SLOW_S) -> None:
        self._sink = sink
        self._now: Callable[[], float] = (clock or SystemClock()).now
        self._share = TraceShare(sink.sample_ratio if sink is not None else 0.0)
        self._slow_s = slow_s
        self.counts = dict.fromkeys([*(why.value for why in Kept), TOO_MANY], 0)
        """Of traces, by why they were kept; and of those that were not."""

    def begin(self, flight: RequestContext) -> None:
        """A request has come. One that its client has traced goes on in the client's trace."""
        context = flight.exchange.head.trace
        if self._sink is None:
            TRACE_ID.set(trace_named(context))
            return
        trace = Trace.below(context, new_id()) if context is not None else None
        if trace is None:
            trace = Trace(random.getrandbits(TRACE_BITS) or 1, new_id())
            trace.sampled = self._share.chosen(trace.trace_id, self._now())
        elif trace.sampled:
            trace.sampled = self._share.allowed(self._now())
        flight.story.spent.trace = trace
        TRACE_ID.set(trace.name())

    def leg(self, flight: RequestContext, start: StartLeg) -> AbstractContextManager[Headers]:
        """Around one leg; gives the headers that its message carries."""
        trace = flight.story.spent.trace
        return nullcontext(flight.exchange.head.trace) if trace is None else LegTimes(trace, start, self._now)

    def ended(self, flight: RequestContext, told: RequestFinished) -> RequestFinished:
        """The request's story, with its trace's name when the trace is kept."""
        trace, sink = flight.story.spent.trace, self._sink
        if trace is None or sink is None:
            return told
        worth = kept(told, self._slow_s)
        if not trace.sampled and (worth is Kept.SHARE or trace.unwanted):
            return told
        if not trace.sampled and not self._share.allowed(self._now()):
            self.counts[TOO_MANY] += 1
            return told
        self.counts[worth.value] += 1
        told = msgspec.structs.replace(told, trace_id=trace.name())
        sink.draw(trace.trace_id, spans_of(flight, told, worth, self._now()))
        return told


class LegTimes:
    """When a leg began and ended, for its span."""

    __slots__ = ("_begun_at", "_now", "_span_id", "_start", "_trace")

    def __init__(self, trace: Trace, start: StartLeg, now: Callable[[], float]) -> None:
        self._trace = trace
        self._start = start
        self._now = now
        self._span_id = new_id()
        self._begun_at = 0.0

    def __enter__(self) -> Headers:
        self._begun_at = self._now()
        return self._trace.headers(self._span_id)

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        start, failure = self._start, None if error is None else why(error)
        self._trace.legs.append(
            LegMark(self._span_id, start.worker_id, start.leg_id, start.kind, self._begun_at, self._now(), failure)
        )
