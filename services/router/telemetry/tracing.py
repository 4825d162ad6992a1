"""One trace per request. While a request runs, the router only notes times. When the request has ended, it makes the
spans if the trace is kept: for a share of all requests, and for those that were slow, failed or resumed.

The workers of a request that is sampled at its start export their own spans below its legs. For a request whose trace
is kept only at its end, the router makes those spans too, from the workers' reports.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import msgspec

from services.router.relay.request_context import RequestContext
from services.router.telemetry.outcome import Kept, kept
from services.router.telemetry.trace import LegMark, Trace, error_of
from services.router.telemetry.trace_spans import new_id, spans_of
from shared.contracts.inference import RequestFinished, StartLeg
from shared.runtime.clock import Clock, SystemClock
from shared.telemetry.log import TRACE_ID
from shared.telemetry.tracing import SpanSink, trace_named

Headers = dict[str, str] | None
TRACE_BITS = 128
TOO_MANY = "too_many"
"""Worth keeping, but over the rate limit."""
SLOW_S = 2.0
"""Default of ROUTER_TRACE_SLOW_S."""


class Tracing:
    """Without a ``sink`` the router only passes the client's trace context on."""

    def __init__(self, sink: SpanSink | None = None, clock: Clock | None = None, *, slow_s: float = SLOW_S) -> None:
        self._sink = sink
        self._now: Callable[[], float] = (clock or SystemClock()).now
        self._share = TraceShare(sink.sample_ratio if sink is not None else 0.0)
        self._slow_s = slow_s
        self.counts = dict.fromkeys([*(one.value for one in Kept), TOO_MANY], 0)
        """Traces by why they were kept, and those over the rate limit."""

    def begin(self, context: RequestContext) -> None:
        """Begin the request's trace: below the client's span if its headers name one."""
        client_trace = context.http_request.head.trace
        if self._sink is None:
            TRACE_ID.set(trace_named(client_trace))
            return
        trace = Trace.below(client_trace, new_id()) if client_trace is not None else None
        if trace is None:
            trace = Trace(random.getrandbits(TRACE_BITS) or 1, new_id())
            trace.sampled = self._share.chosen(trace.trace_id, self._now())
        elif trace.sampled:
            trace.sampled = self._share.allowed(self._now())
        context.trace = trace
        TRACE_ID.set(trace.name())

    def leg(self, context: RequestContext, start: StartLeg) -> AbstractContextManager[Headers]:
        """``with`` this around one leg; it returns the headers for the leg's message."""
        trace = context.trace
        return nullcontext(context.http_request.head.trace) if trace is None else LegTimes(trace, start, self._now)

    def ended(self, context: RequestContext, finished: RequestFinished) -> RequestFinished:
        """Keep or drop the trace of a request that has ended. Returns its record, with the trace id of a kept trace."""
        trace, sink = context.trace, self._sink
        if trace is None or sink is None:
            return finished
        why = kept(finished, self._slow_s)
        if not trace.sampled and (why is Kept.SHARE or trace.unwanted):
            return finished
        if not trace.sampled and not self._share.allowed(self._now()):
            self.counts[TOO_MANY] += 1
            return finished
        self.counts[why.value] += 1
        finished = msgspec.structs.replace(finished, trace_id=trace.name())
        sink.draw(trace.trace_id, spans_of(context, finished, why, self._now()))
        return finished


class LegTimes:
    """Notes when a leg began and ended, for its span."""

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
        start, failure = self._start, None if error is None else error_of(error)
        self._trace.legs.append(
            LegMark(self._span_id, start.worker_id, start.leg_id, start.kind, self._begun_at, self._now(), failure)
        )


FEW_PER_S = 0.2
FEW_AT_ONCE = 10.0
"""Requests traced in addition to the share: all of them at low traffic, a negligible part at high traffic."""
ODD_PER_S_MAX = 100.0
ODD_AT_ONCE_MAX = 200.0
"""Limits on traces kept for unusual requests or because clients ask for them. When every request fails, more traces
would not help an operator, and the router needs its CPU for requests.
"""
CHOOSING_BITS = 64
"""Low bits of the trace id that are compared with the sample ratio, as OpenTelemetry's TraceIdRatioBased does."""


class TokenBucket:
    """Allows ``per_s`` a second on average, and ``most`` at once."""

    __slots__ = ("_at", "_left", "_most", "_per_s")

    def __init__(self, per_s: float, most: float) -> None:
        self._per_s = per_s
        self._most = most
        self._left = most
        self._at = 0.0

    def take(self, now: float) -> bool:
        """Take one, if one is left."""
        self._left = min(self._most, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class TraceShare:
    """Which requests are traced: a share chosen at the start, and unusual ones (failed, slow, resumed) at the end.

    Rate limits bound both, so that tracing stays cheap. A single request is always traced; an unusual one is traced
    unless there are too many of them. With ``ratio`` 0 only unusual requests are traced.
    """

    __slots__ = ("_below", "_few", "_mask", "_odd")

    def __init__(self, ratio: float) -> None:
        self._mask = (1 << CHOOSING_BITS) - 1
        self._below = round(ratio * (1 << CHOOSING_BITS))
        self._few = TokenBucket(FEW_PER_S, FEW_AT_ONCE) if ratio > 0.0 else TokenBucket(0.0, 0.0)
        self._odd = TokenBucket(ODD_PER_S_MAX, ODD_AT_ONCE_MAX)

    def chosen(self, trace_id: int, now: float) -> bool:
        """Whether a request without a client's trace context is traced from its start."""
        return (trace_id & self._mask) < self._below or self._few.take(now)

    def allowed(self, now: float) -> bool:
        """Whether one more unusual request, or one that its client wants traced, may be traced."""
        return self._odd.take(now)
