"""Where requests wait: asyncio futures around the pure ``Admission``, and a timer for its scheduling passes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Final

from services.router.admission.admission import Admission
from services.router.admission.queue_metrics import QueueMetrics
from services.router.admission.queues import QueueEntry
from services.router.placement.placement import Placement, Rejection
from services.router.request.context import RequestContext
from shared.contracts.failures import Reason
from shared.runtime.clock import Clock

PASS_S_MIN: Final = 0.001
"""Shortest time between two scheduling passes: changes in between are handled together."""
PASSES_SHARE_MAX: Final = 0.2
"""Share of the event loop's time for scheduling passes. Each change in the fleet triggers a pass, and with a long queue
a pass takes milliseconds: without this bound, passes would delay the streams that the router relays.
"""
CLOSED: Final = Rejection(
    reason=Reason.OVERLOADED, message="This router is being shut down. Try again shortly.", retry_after_s=1.0
)


class AdmissionQueue:
    """Call ``reschedule`` whenever something has changed that may let a request begin."""

    def __init__(self, admission: Admission, clock: Clock, metrics: QueueMetrics) -> None:
        self._admission = admission
        self._now: Callable[[], float] = clock.now
        self._metrics = metrics
        metrics.queue.set_function(lambda: float(len(self._waiting)))
        self._waiting: dict[QueueEntry, asyncio.Future[Placement | Rejection]] = {}
        self.lines_waiting: dict[str, int] = {}
        """Lines of batches that wait, by tenant."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._pause_until = 0.0
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def clients_waiting(self) -> int:
        """Waiting requests that are no lines of batches."""
        return len(self._waiting) - sum(self.lines_waiting.values())

    def ended(self, entry: QueueEntry, context: RequestContext) -> None:
        """The request of this entry has ended: settle its tenant's account."""
        computed, tokens_out = computed_tokens(context)
        self._admission.ended(entry, computed, tokens_out)
        self._metrics.ended(entry.request.tenant, context.reason, max(0, computed), max(0, tokens_out))
        self.reschedule()

    def offer(self, entry: QueueEntry) -> Placement | Rejection | None:
        """The result, if it is decided at once; None: ``wait`` for it."""
        now = self._now()
        result = self._admission.offer(entry, now)
        if result is not None:
            return result
        if self._closed:
            self._admission.withdraw(entry)
            return CLOSED
        self._waiting[entry] = asyncio.get_running_loop().create_future()
        self._wake_at(self._admission.wakes_at(now))
        return None

    def has(self, entry: QueueEntry) -> bool:
        """Whether ``wait`` must follow."""
        return entry in self._waiting

    async def wait(self, entry: QueueEntry, context: RequestContext) -> Placement | Rejection:
        """Wait for the result. When the client leaves, the entry leaves the queue."""
        begun, decided = self._now(), self._waiting[entry]
        leave = functools.partial(settle, decided, LEFT)
        context.http_request.on_left.append(leave)
        if context.http_request.left:
            leave()
        line_of = entry.request.tenant if context.http_request.head.is_batch else None
        if line_of is not None:
            self.lines_waiting[line_of] = self.lines_waiting.get(line_of, 0) + 1
        try:
            return await decided
        finally:
            if line_of is not None:
                self._line_waits_no_more(line_of)
            context.http_request.on_left.remove(leave)
            del self._waiting[entry]
            self._admission.withdraw(entry)
            self._metrics.waited(self._now() - begun)

    def _line_waits_no_more(self, tenant: str) -> None:
        self.lines_waiting[tenant] -= 1
        if not self.lines_waiting[tenant]:
            del self.lines_waiting[tenant]

    def reschedule(self, lag_s: float = 0.0) -> None:
        """Run a scheduling pass soon, at least ``lag_s`` from now: see ``ReservationBook.lag_s``."""
        if self._waiting:
            self._wake_at(self._admission.pass_at(self._now()) + lag_s)

    def close(self) -> None:
        """Reject all that wait: the router is shutting down."""
        self._closed = True
        for entry, decided in self._waiting.items():
            self._admission.withdraw(entry)
            settle(decided, CLOSED)

    def _wake_at(self, at: float | None) -> None:
        if at is None:
            return
        now = self._now()
        at = max(at, now + PASS_S_MIN, self._pause_until)
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_later(at - now, self._schedule)

    def _schedule(self) -> None:
        self._timer = None
        begun = self._now()
        for entry, result in self._admission.schedule(begun):
            if (decided := self._waiting.get(entry)) is not None:
                settle(decided, result)
        ended = self._now()
        self._pause_until = ended + (ended - begun) / PASSES_SHARE_MAX
        if self._waiting:
            self._wake_at(self._admission.wakes_at(ended))


LEFT: Final = Rejection(reason=Reason.CANCELLED, message="The client closed the connection.")


def settle(decided: asyncio.Future[Placement | Rejection], result: Placement | Rejection) -> None:
    """Set the result, unless the future has one."""
    if not decided.done():
        decided.set_result(result)


def computed_tokens(context: RequestContext) -> tuple[int, int]:
    """Computed prompt tokens, and tokens of the completion; -1 where no report says."""
    if context.report is None:
        return -1, -1
    report = context.prefill_report or context.report
    computed = report.prompt_tokens - report.cached_tokens - report.received_tokens
    return max(0, computed), context.report.completion_tokens
