"""Counts what each key's requests use, and reports it to the metrics collectors until one has stored it.

The engines' time of a request is computed by the step times that their workers have learned and published.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import NamedTuple

from services.router.placement import cost
from services.router.placement.placement import Placement
from services.router.relay.request_context import RequestContext
from services.router.state import fleet_table as t
from services.router.state.cluster_view import ClusterView
from services.router.state.worker_view import WorkerView
from services.router.usage.unstored import Place, UnstoredUsage
from shared.bus.port import Bus, BusError
from shared.contracts.channels import REPORT_USAGE
from shared.contracts.ids import RouterId
from shared.contracts.inference import RequestFinished
from shared.contracts.usage import COUNT_MAX, NAME_CHARS_MAX, ReportUsage, UsageCounts
from shared.runtime.clock import Clock

RANKS_MAX = 1024
"""Of an engine, whatever a faulty worker says."""


class UsedTokens(NamedTuple):
    """Of one finished request."""

    prompt: int
    cached: int
    completion: int
    sequences: int


def engine_seconds(
    cluster: ClusterView, placement: Placement, finished: RequestFinished, used: UsedTokens
) -> tuple[float, float]:
    """Prefill and decode, each times the engine's ranks. Of a decode step, whose fixed cost all requests of the batch
    share, the request's share in the batch at its end; 0.0 for a worker that is gone. The prefill gives each completion
    its first token.
    """
    computing = placement.prefill or placement.decode
    elsewhere = finished.received_tokens if placement.prefill is None else -1
    fetched = max(0, finished.readback_tokens, elsewhere)
    computed = max(0, used.prompt - used.cached - fetched)
    n = _numbers(cluster, placement.decode)
    first = n if computing is placement.decode else _numbers(cluster, computing)
    ranks = _ranks(placement.decode)
    prefill_s = _prefill_s(first, computed, used.prompt - computed) * _ranks(computing)
    again = max(0, finished.recomputed_tokens) + max(0, finished.reprefilled_tokens)
    prefill_s += _prefill_s(n, again, max(0, used.prompt - again)) * ranks
    return prefill_s, _decode_s(n, used) * ranks


def _ranks(view: WorkerView) -> int:
    return max(1, min(view.record.ranks, RANKS_MAX))


def _numbers(cluster: ClusterView, view: WorkerView) -> list[float] | None:
    """Of a worker that is not gone, as floats of Python: arithmetic on numpy's is several times slower."""
    alive = cluster.workers.get(view.record.worker_id) is view
    return cluster.table.numbers[:, view.row].tolist() if alive else None


def _prefill_s(n: list[float] | None, computed: int, before: int) -> float:
    return float(cost.work_s(n, computed, before)) if n is not None and computed else 0.0


def _decode_s(n: list[float] | None, used: UsedTokens) -> float:
    if n is None:
        return 0.0
    context_tokens = used.prompt + used.completion / 2
    batch = max(1.0, n[t.DECODING])
    step_s = n[t.DECODE_STEP_S] / batch + n[t.DECODE_REQUEST_S] + n[t.DECODE_CONTEXT_TOKEN_S] * context_tokens
    return float(step_s) * max(0, used.completion - used.sequences)


log = logging.getLogger("baton.router")

REPORT_S = 3.0
"""Between two reports. What ended since the last one is lost when the router is killed."""
STORE_S_MAX = 10.0
"""For a collector to store a report."""
UNSTORED_S_MAX = 60.0
"""An operator is told when usage is not stored for so long, where budgets need it or it is lost."""
CLOSE_S_MAX = 2.0
"""For the last reports of a router that stops."""
DAY_MS = 86_400_000
CLIENT_GONE = 499
CLIENT_ERROR = 400


class UsageLog:
    """Counts every request once, when it ends."""

    def __init__(self, router_id: RouterId, bus: Bus, clock: Clock, cluster: ClusterView) -> None:
        self._router_id = router_id
        self._bus = bus
        self._clock = clock
        self._cluster = cluster
        self.unstored = UnstoredUsage()
        self._today = (-1, "")
        """Days since 1970, and the same as a date."""
        self.unstored_since: float | None = None
        """When the first of the reports that no collector has stored was sent; None if all are stored."""

    @property
    def failure(self) -> str:
        """What an operator must correct; empty when there is nothing."""
        if self.unstored_since is None or self._clock.now() - self.unstored_since < UNSTORED_S_MAX:
            return ""
        if self.unstored.uncounted:
            return f"no metrics collector stores usage: {self.unstored.uncounted} requests are not counted"
        if self.unstored.counts_for_budgets:
            return "no metrics collector stores usage: other routers do not see it for the budgets of API keys"
        return ""

    def ended(self, context: RequestContext, finished: RequestFinished, used: tuple[int, int]) -> None:
        """A request has ended and has used so many prompt and completion tokens."""
        key = context.http_request.head.client.key
        place = Place(self._day(), key.tenant, key.label, self._model(context)[:NAME_CHARS_MAX])
        self.unstored.add(place, self._counts(context, finished, used), key.monthly_tokens)

    def _day(self) -> str:
        number = self._clock.wall_ms() // DAY_MS
        if number != self._today[0]:
            self._today = (number, day_of(number))
        return self._today[1]

    def _model(self, context: RequestContext) -> str:
        """The served model: a client may name any other, which must not become a row of the ledger."""
        if context.placement is not None:
            return context.facts.model or context.placement.decode.record.model
        return context.facts.model if self._cluster.knows(context.facts.model) else ""

    def _counts(self, context: RequestContext, finished: RequestFinished, used: tuple[int, int]) -> UsageCounts:
        status, placement = finished.status, context.placement
        cancelled = status == CLIENT_GONE
        failed = status >= CLIENT_ERROR and not cancelled
        if placement is None or (failed and not _computed(context)):
            return UsageCounts(requests=1, failed=int(failed), cancelled=int(cancelled))
        prompt, completion = (max(0, min(tokens, COUNT_MAX)) for tokens in used)
        cached = max(0, min(finished.cached_tokens, prompt))
        tokens = UsedTokens(prompt, cached, completion, context.facts.sequences)
        prefill_s, decode_s = engine_seconds(self._cluster, placement, finished, tokens)
        return UsageCounts(
            requests=1,
            failed=int(failed),
            cancelled=int(cancelled),
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=completion,
            prefill_s=prefill_s,
            decode_s=decode_s,
        )

    async def report(self) -> None:
        """Report until cancelled."""
        while True:
            await asyncio.sleep(REPORT_S)
            await self.report_now()

    async def report_now(self) -> None:
        """Report what is not stored yet; what cannot be stored now stays for the next time."""
        while self.unstored.next_report():
            report = ReportUsage(router_id=self._router_id, number=self.unstored.number, rows=self.unstored.report)
            try:
                await self._bus.ask(REPORT_USAGE, report, timeout_s=STORE_S_MAX)
            except BusError as error:
                if self.unstored_since is None:
                    self.unstored_since = self._clock.now()
                log.debug("usage was not stored, trying again: %s", error)
                return
            self.unstored.stored(report.number)
            self.unstored_since = None

    async def close(self) -> None:
        """Report the last requests; in vain if no collector stores them in time."""
        try:
            async with asyncio.timeout(CLOSE_S_MAX):
                await self.report_now()
        except TimeoutError:
            log.warning("the usage of the last requests was not stored: no collector took it")


def day_of(number: int) -> str:
    """The date so many days after 1970 began, in UTC."""
    return datetime.fromtimestamp(number * DAY_MS / 1000, UTC).date().isoformat()


def _computed(context: RequestContext) -> bool:
    """Whether an engine is known to have computed something of the present attempt."""
    return context.report is not None or context.prefill_report is not None or bool(context.relayed)
