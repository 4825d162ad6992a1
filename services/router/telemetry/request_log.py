"""What the router records of each request that ends: its record, metrics, a log line, and a report to the collector.

The record is made from the request's context and the reports of its legs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from services.router.request.context import RequestContext
from services.router.request.facts import Mode
from services.router.telemetry.request_metrics import RequestMetrics
from services.router.telemetry.tracing import Tracing
from services.router.telemetry.ttft import Legs, ttft_parts, ttft_s
from shared.bus.port import Bus, BusDown
from shared.contracts.channels import REQUESTS_FINISHED
from shared.contracts.decisions import TtftParts
from shared.contracts.failures import Reason
from shared.contracts.ids import DecisionId, RouterId, WorkerId
from shared.contracts.inference import KV_MOVES_MAX, KvMoved, LegReport, RequestFinished, RequestsFinished
from shared.contracts.kv_exchange import KvRead, KvTransferReport
from shared.telemetry.prometheus import Count

AGGREGATED: Final = Mode.AGGREGATED
DISAGGREGATED: Final = Mode.DISAGGREGATED

NO_REPORT: Final = LegReport(prompt_tokens=-1, completion_tokens=-1, cached_tokens=-1, received_tokens=-1)


def finished_request(context: RequestContext, now: float) -> RequestFinished:
    """The record for the collector, the log and ``/baton/decisions``."""
    placement, timings, decision = context.placement, context.timings, context.decision
    report, prefill_report = context.report or NO_REPORT, context.prefill_report
    completion_tokens = report.completion_tokens
    generating_s = timings.last_at - timings.first_at
    mode = placement.mode if placement is not None else AGGREGATED
    kv = kv_numbers(prefill_report, report, mode)
    first_token_s, parts = first_token(context)
    decode_worker = placement.decode.record.worker_id if placement is not None else ""
    prefill_worker = ""
    if placement is not None and placement.prefill is not None:
        prefill_worker = placement.prefill.record.worker_id
    return RequestFinished(
        request_id=context.http_request.head.request_id,
        decision_id=decision.decision_id if decision is not None else DecisionId(""),
        tenant=decision.request.tenant if decision is not None else context.http_request.head.client.key.tenant,
        model=context.model(),
        path=context.facts.path,
        mode=mode,
        status=context.status,
        reason=context.reason,
        attempts=context.attempts,
        resumes=context.resumes,
        resumed_tokens=context.resumed_tokens,
        prefill_worker=prefill_worker,
        decode_worker=decode_worker,
        prompt_tokens=report.prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=cached_tokens(prefill_report, report, mode),
        received_tokens=report.received_tokens,
        received_bytes=report.received_bytes,
        predicted_cached_tokens=predicted_cached_tokens(context),
        ttft_s=first_token_s,
        ttft_parts=parts,
        e2e_s=(timings.answered_at or now) - timings.started_at,
        itl_s=generating_s / (completion_tokens - 1) if completion_tokens > 1 and generating_s > 0 else -1.0,
        placement_s=timings.place_s if decision is not None else -1.0,
        prefill_s=timings.prefill_s,
        streamed_handoff=placement is not None and placement.streamed,
        recomputed_tokens=kv.recomputed_tokens,
        reprefilled_tokens=kv.reprefilled_tokens,
        recompute_slowed_s=kv.slowed_s,
        drafted_tokens=kv.drafted_tokens,
        accepted_tokens=kv.accepted_tokens,
        readback_tokens=kv.readback_tokens,
        kv_wait_s=kv.wait_s,
        kv_read_s=kv.read_s,
        kv_moves=kv_moves(prefill_report, prefill_worker, report, decode_worker),
        ttft_target_s=decision.ttft_target_s if decision is not None else -1.0,
        itl_target_s=decision.itl_target_s if decision is not None else -1.0,
        is_batch=context.http_request.head.is_batch,
    )


def first_token(context: RequestContext) -> tuple[float, TtftParts | None]:
    """The time to the first token and its parts; -1 and None where there was none or they are not known."""
    timings, report = context.timings, context.report
    if not timings.first_at:
        return -1.0, None
    whole_s = ttft_s(timings.first_at - timings.started_at, report, stream=context.facts.stream)
    if report is None or report.first_token_s <= 0 or context.resumes:
        return whole_s, None  # The report of a leg that resumed a stream does not cover the first token.
    streamed = context.placement is not None and context.placement.streamed
    legs = Legs(answering=report, prefill=context.prefill_report, streamed=streamed)
    return whole_s, ttft_parts(whole_s, timings, legs)


def predicted_cached_tokens(context: RequestContext) -> int:
    """Prompt tokens that placement expected to be cached; -1 where the prompt was not tokenized exactly, or the request
    was resumed and its last placement covered generated tokens too.
    """
    exact = context.prompt is not None and context.prompt.exact and not context.resumes
    return context.placement.cached_tokens if context.placement is not None and exact else -1


class KvNumbers:
    """See the fields of ``RequestFinished``; -1: unknown."""

    recomputed_tokens = -1
    reprefilled_tokens = -1
    slowed_s = -1.0
    drafted_tokens = 0
    accepted_tokens = 0
    readback_tokens = -1
    wait_s = -1.0
    read_s = -1.0


UNKNOWN: Final = KvNumbers()


def kv_numbers(prefill: LegReport | None, answering: LegReport, mode: Mode) -> KvNumbers:
    """From the KV transfer reports of the prefill leg, if there was one, and of the leg that answered."""
    first, last = prefill.kv if prefill is not None else None, answering.kv
    if first is None and last is None:
        return UNKNOWN
    apart = mode is DISAGGREGATED
    computing = first if apart else last
    waits_s: list[float] = []
    reads_s: list[float] = []
    for transfer_report in (first, last):
        if transfer_report is not None and transfer_report.reads:
            waits_s += _wait_s(transfer_report)
            reads_s += [read.read_s for read in transfer_report.reads if read.read_at]
    numbers = KvNumbers()
    if apart and last is not None:
        numbers.recomputed_tokens = last.recomputed_tokens
    if last is not None:
        numbers.reprefilled_tokens = last.reprefilled_tokens
        numbers.slowed_s = last.recompute_slowed_s
        numbers.drafted_tokens = last.drafted_tokens
        numbers.accepted_tokens = last.accepted_tokens
    if computing is not None:
        numbers.readback_tokens = computing.fetched_tokens
    if waits_s:
        numbers.wait_s = sum(waits_s)
    if reads_s:
        numbers.read_s = sum(reads_s)
    return numbers


def cached_tokens(prefill: LegReport | None, answering: LegReport, mode: Mode) -> int:
    """Prompt tokens cached at the worker that computed the prompt; as the decode worker knows them where the
    prefill leg has not reported. A decode worker that had all of them, or gave up waiting, knows its own only.
    """
    if prefill is not None:
        return prefill.cached_tokens
    reported = answering.kv.prefill_cached_tokens if mode is DISAGGREGATED and answering.kv is not None else -1
    return reported if reported >= 0 else answering.cached_tokens


def kv_moves(prefill: LegReport | None, prefill_id: str, answering: LegReport, answering_id: str) -> list[KvMoved]:
    """The reads of KV between workers."""
    moves: list[KvMoved] = []
    for report, reader_id in ((prefill, prefill_id), (answering, answering_id)):
        if report is not None and report.kv is not None and report.kv.reads:
            moves += [
                KvMoved(source_id=read.worker_id, reader_id=WorkerId(reader_id), tokens=read.tokens, bytes=read.bytes)
                for read in report.kv.reads
                if read.tokens
            ]
    return moves[:KV_MOVES_MAX]


def _wait_s(transfer_report: KvTransferReport) -> list[float]:
    """From the first lease request to the first grant, on one worker's clock; empty where nothing was granted."""
    granted: list[KvRead] = [read for read in transfer_report.reads if read.granted_at]
    if not granted:
        return []
    requested_at = min(read.requested_at for read in transfer_report.reads)
    return [max(0.0, min(read.granted_at for read in granted) - requested_at)]


log = logging.getLogger("baton.request")

REPORT_S: Final = 0.5
"""Interval between two reports to the collector, and the longest delay of one: nobody who reads them decides faster."""
REPORTED_AT_ONCE_MAX: Final = 1000
"""Finished requests in one message: packing more would hold up the streams that the event loop relays."""
UNREPORTED_MAX: Final = 10_000
"""Finished requests kept while NATS is down; requests that end beyond that are counted and not reported."""


class FinishedReports:
    """Finished requests until they are reported to the collector, many in one message."""

    def __init__(self, router_id: RouterId, unreported: Count) -> None:
        """``unreported`` counts the requests that are never reported."""
        self._router_id = router_id
        self._unreported = unreported
        self._waiting: list[RequestFinished] = []

    def __len__(self) -> int:
        """Finished requests that are not reported yet."""
        return len(self._waiting)

    def add(self, finished: RequestFinished) -> None:
        """Report this request with the next ones."""
        if len(self._waiting) < UNREPORTED_MAX:
            self._waiting.append(finished)
        else:
            self._unreported.value += 1

    async def follow(self, bus: Bus, catch_up: Callable[[], None]) -> None:
        """Report until cancelled. ``catch_up`` adds the requests that have ended."""
        while True:
            await asyncio.sleep(REPORT_S)
            catch_up()
            if self._waiting:
                await self._send(bus)

    async def close(self, bus: Bus) -> None:
        """Report the last requests."""
        while self._waiting:
            if not await self._send(bus):
                log.warning("the last %d finished requests were not reported: NATS is down", len(self._waiting))
                return

    async def _send(self, bus: Bus) -> bool:
        """Send one message; while NATS is down its requests are kept for the next one."""
        requests, self._waiting = self._waiting[:REPORTED_AT_ONCE_MAX], self._waiting[REPORTED_AT_ONCE_MAX:]
        try:
            await bus.publish(REQUESTS_FINISHED, RequestsFinished(router_id=self._router_id, requests=requests))
        except BusDown as error:
            self._waiting = requests + self._waiting
            log.debug("finished requests were not reported: %s", error)
            return False
        return True


class RequestLog:
    """Records every request once, when it ends."""

    def __init__(self, router_id: RouterId, tracing: Tracing, metrics: RequestMetrics, *, log_requests: bool) -> None:
        self._tracing = tracing
        self._log_requests = log_requests and log.isEnabledFor(logging.INFO)
        self.reports = FinishedReports(router_id, metrics.unreported)
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

    def quarantined(self) -> None:
        """A request is refused from now on, because an engine may have died of it."""
        self.metrics.quarantined.value += 1

    def finished(self, context: RequestContext, now: float) -> RequestFinished:
        """Record a request that has ended; returns its record."""
        finished = self._tracing.ended(context, finished_request(context, now))
        if context.facts.options.prefetch:
            self.metrics.prefetched(finished)
        else:
            self.metrics.finished(finished, context.placement, context.timings.gap_s_max)
            self.reports.add(finished)
        if self._log_requests:
            facts = log_facts(finished)
            if context.prefetch is not None:
                facts["prefetch"] = msgspec.structs.asdict(context.prefetch)
            if "trace_id" not in facts and (trace_id := context.trace_id()):
                facts["trace_id"] = trace_id
            log.info("request", extra={"facts": facts})
        return finished


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
