"""Where requests wait for their turn: futures around the pure ``Admission``, and the bell that makes it look again."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.router.admission.admission import Admission
from services.router.admission.queues import QueueEntry
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.relay.request_context import RequestContext
from services.router.telemetry.metrics import QueueMetrics
from shared.contracts.failures import Reason
from shared.runtime.clock import Clock

TURN_S_MIN = 0.001
"""Between two turns: what happens in between is looked at together."""
TURNS_SHARE_MAX = 0.2
"""Of the event loop's time, for turns."""
CLOSED = Rejection(
    reason=Reason.OVERLOADED, message="This router is being shut down. Try again shortly.", retry_after_s=1.0
)


class AdmissionQueue:
    """Admits requests. ``ring`` whenever something has changed that may let one begin."""

    def __init__(self, admission: Admission, clock: Clock, metrics: QueueMetrics) -> None:
        self._admission = admission
        self._now: Callable[[], float] = clock.now
        self._metrics = metrics
        metrics.queue.set_function(lambda: float(len(self._waiting)))
        self._waiting: dict[QueueEntry, asyncio.Future[Placement | Rejection]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._rest_until = 0.0
        self._closed = False

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @contextmanager
    def ticket(self, context: RequestContext, need: PlacementRequest) -> Iterator[QueueEntry]:
        """From a request's wish to be served to its end, when its tenant's account is settled."""
        ticket = QueueEntry(need, context.timings.started_at, context.ends_at)
        try:
            yield ticket
        finally:
            computed, tokens_out = computed_tokens(context)
            self._admission.ended(ticket, computed, tokens_out)
            self._metrics.ended(need.tenant, context.reason, max(0, computed), max(0, tokens_out))
            self.ring()

    def offer(self, ticket: QueueEntry) -> Placement | Rejection | None:
        """Where it goes, if that is decided at once."""
        return self._admission.offer(ticket, self._now())

    async def turn_of(self, ticket: QueueEntry, context: RequestContext) -> Placement | Rejection:
        """Wait until it is decided. A client that leaves gives its place away."""
        if self._closed:
            self._admission.withdraw(ticket)
            return CLOSED
        begun = self._now()
        decided: asyncio.Future[Placement | Rejection] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = decided
        self._wake_at(self._admission.wakes_at(begun))
        leave = functools.partial(settle, decided, LEFT)
        context.http_request.on_left.append(leave)
        try:
            return await decided
        finally:
            context.http_request.on_left.remove(leave)
            del self._waiting[ticket]
            self._admission.withdraw(ticket)
            self._metrics.waited(self._now() - begun)

    def ring(self, lag_s: float = 0.0) -> None:
        """Something has changed. What all routers hear of at once is looked at ``lag_s`` later."""
        if self._waiting:
            self._wake_at(self._now() + lag_s)

    def close(self) -> None:
        """Nobody waits any more: a router that is shut down tells them to ask another."""
        self._closed = True
        for ticket, decided in self._waiting.items():
            self._admission.withdraw(ticket)
            settle(decided, CLOSED)

    def _wake_at(self, at: float | None) -> None:
        if at is None:
            return
        now = self._now()
        at = max(at, now + TURN_S_MIN, self._rest_until)
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_later(at - now, self._turn)

    def _turn(self) -> None:
        self._timer = None
        begun = self._now()
        for ticket, verdict in self._admission.schedule(begun):
            if (decided := self._waiting.get(ticket)) is not None:
                settle(decided, verdict)
        ended = self._now()
        self._rest_until = ended + (ended - begun) / TURNS_SHARE_MAX
        if self._waiting:
            self._wake_at(self._admission.wakes_at(ended))


LEFT = Rejection(reason=Reason.CANCELLED, message="the client left")


def settle(decided: asyncio.Future[Placement | Rejection], verdict: Placement | Rejection) -> None:
    """Tell whoever waits, unless it was told before."""
    if not decided.done():
        decided.set_result(verdict)


def computed_tokens(context: RequestContext) -> tuple[int, int]:
    """Prompt tokens that were computed for it, and tokens of its completion; -1 where nobody says."""
    if context.report is None:
        return -1, -1
    report = context.prefill_report or context.report
    return max(
        0, report.prompt_tokens - report.cached_tokens - report.received_tokens
    ), context.report.completion_tokens
