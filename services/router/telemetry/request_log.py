"""What the router records of each request that ends: metrics, a log line, and a report to the collector."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from services.router.relay.request_context import RequestContext
from services.router.telemetry.finished import finished_request
from services.router.telemetry.metrics import RequestMetrics
from services.router.telemetry.tracing import Tracing
from shared.bus.port import Bus, BusDown
from shared.contracts.channels import REQUESTS_FINISHED
from shared.contracts.failures import Reason
from shared.contracts.ids import RouterId
from shared.contracts.inference import RequestFinished, RequestsFinished

log = logging.getLogger("baton.request")

REPORT_S = 0.1
"""Interval between two reports to the collector."""
UNREPORTED_MAX = 10_000
"""Finished requests kept while NATS is down; requests that end beyond that are not reported."""


class RequestLog:
    """Records every request once, when it ends."""

    def __init__(self, router_id: RouterId, tracing: Tracing, metrics: RequestMetrics, *, log_requests: bool) -> None:
        self._router_id = router_id
        self._tracing = tracing
        self._log_requests = log_requests and log.isEnabledFor(logging.INFO)
        self._unreported: list[RequestFinished] = []
        self.metrics = metrics

    def refused(self, status: int, reason: str, **known: str) -> None:
        """A request was refused before it was read; ``known``: fields of its head, if that was read."""
        self.metrics.refused(status, reason)
        if self._log_requests and known:
            facts = {name: value for name, value in known.items() if value}
            log.info("request", extra={"facts": {**facts, "status": status, "reason": reason}})

    def retried(self, reason: Reason, *, resumed: bool) -> None:
        """A request is retried; ``resumed``: after part of the response was sent."""
        self.metrics.retried(reason, resumed=resumed)

    def resumed(self, broken_s: float) -> None:
        """A stream continues after an interruption of ``broken_s``."""
        self.metrics.resumed(broken_s)

    def quarantined(self) -> None:
        """A request is refused from now on, because an engine may have died of it."""
        self.metrics.quarantined.inc()

    def finished(self, context: RequestContext, now: float) -> RequestFinished:
        """Record a request that has ended; returns its record."""
        finished = self._tracing.ended(context, finished_request(context, now))
        self.metrics.finished(finished, context.placement, context.timings.gap_s_max)
        if len(self._unreported) < UNREPORTED_MAX:
            self._unreported.append(finished)
        if self._log_requests:
            log.info("request", extra={"facts": log_facts(finished)})
        return finished

    async def report(self, bus: Bus) -> None:
        """Report to the collector until cancelled."""
        while True:
            await asyncio.sleep(REPORT_S)
            await self.report_now(bus)

    async def report_now(self, bus: Bus) -> None:
        """Send what is not reported yet; while NATS is down it is kept for the next report."""
        if not self._unreported:
            return
        requests, self._unreported = self._unreported, []
        try:
            await bus.publish(REQUESTS_FINISHED, RequestsFinished(router_id=self._router_id, requests=requests))
        except BusDown as error:
            self._unreported = requests + self._unreported
            log.debug("finished requests were not reported: %s", error)


def log_facts(finished: RequestFinished) -> dict[str, object]:
    """The log line of a request, without unknown values. It has no text of the prompt or the completion."""
    values = {name: getattr(finished, name) for name in finished.__struct_fields__ if name != "ttft_parts"}
    if finished.ttft_parts is not None:
        parts = msgspec.structs.asdict(finished.ttft_parts)
        values |= {f"ttft_{name}": value for name, value in parts.items() if value}
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in values.items()
        if value not in (-1, -1.0, "")
    }
