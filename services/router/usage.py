"""What API keys use: counted for each request, reported to the metrics collectors, and held against monthly budgets.

The engines' time of a request is computed by the step times that their workers have learned and published. A key has
used what the ledger has of it, what this router's requests have used since, and what its running requests here are
charged. Requests at other routers count when these have reported them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Final, NamedTuple

from services.router.placement import specification
from services.router.request.client import ApiClient
from services.router.request.context import RequestContext
from services.router.state import fleet_table as t
from services.router.state.cluster_view import ClusterView
from services.router.state.worker_view import WorkerView
from shared.bus.port import Bus, BusError, StoredValue, watch_store
from shared.contracts.api_keys import Key
from shared.contracts.channels import REPORT_USAGE, USAGE
from shared.contracts.ids import RouterId
from shared.contracts.inference import RequestFinished
from shared.contracts.usage import (
    COUNT_MAX,
    MONTH_CHARS,
    NAME_CHARS_MAX,
    ROWS_PER_REPORT_MAX,
    ReportUsage,
    UsageCounts,
    UsageMonth,
    UsageRow,
)
from shared.http.errors import HttpError, error_body
from shared.runtime.clock import Clock

ROWS_MAX: Final = 10_000
"""Rows kept while no collector stores them. What would need a further row is not counted."""


class Spender(NamedTuple):
    """Whose budget of which month."""

    month: str
    tenant: str
    key: str


Place = tuple[str, str, str, str]
"""A row of the ledger: day, tenant, key, model."""


class Used:
    """``UsageCounts`` that can be added to."""

    __slots__ = (
        "cached_tokens",
        "cancelled",
        "completion_tokens",
        "decode_s",
        "failed",
        "prefill_s",
        "prompt_tokens",
        "requests",
    )

    def __init__(self, requests: int = 0) -> None:
        self.requests = requests
        self.failed = self.cancelled = 0
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.prefill_s = self.decode_s = 0.0

    def add(self, more: Used) -> None:
        self.requests += more.requests
        self.failed += more.failed
        self.cancelled += more.cancelled
        self.prompt_tokens += more.prompt_tokens
        self.cached_tokens += more.cached_tokens
        self.completion_tokens += more.completion_tokens
        self.prefill_s += more.prefill_s
        self.decode_s += more.decode_s

    def counts(self) -> UsageCounts:
        return UsageCounts(
            requests=self.requests,
            failed=self.failed,
            cancelled=self.cancelled,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
        )


class _Sum:
    """What the requests of one place have used."""

    __slots__ = ("monthly_tokens", "place", "spender", "used")

    def __init__(self, place: Place) -> None:
        day, tenant, key, _model = place
        self.place = place
        self.spender = Spender(day[:MONTH_CHARS], tenant, key)
        self.used = Used()
        self.monthly_tokens = 0

    def row(self) -> UsageRow:
        day, tenant, key, model = self.place
        return UsageRow(
            day=day, tenant=tenant, key=key, model=model, counts=self.used.counts(), monthly_tokens=self.monthly_tokens
        )


class UnstoredUsage:
    """Adds up what requests used, and hands it out in numbered reports. A report stays the same until it is stored."""

    def __init__(self) -> None:
        self._open: dict[Place, _Sum] = {}
        self._tokens: dict[Spender, int] = {}
        self.number = 0
        """Number of the present report."""
        self.report: list[UsageRow] = []
        """Rows that are handed out, and not stored yet."""
        self.uncounted = 0
        """Requests that found no room."""

    def add(self, place: Place, used: Used, monthly_tokens: int) -> None:
        """A request has ended."""
        known = self._open.get(place)
        if known is None:
            if len(self._open) >= ROWS_MAX:
                self.uncounted += used.requests
                return
            known = self._open[place] = _Sum(place)
        known.used.add(used)
        known.monthly_tokens = monthly_tokens
        tokens, spender = self._tokens, known.spender
        tokens[spender] = tokens.get(spender, 0) + used.prompt_tokens + used.completion_tokens

    def next_report(self) -> bool:
        """Put together ``report``, unless there is one. False: there is nothing to report."""
        if not self.report and self._open:
            self.number += 1
            places = list(islice(self._open, ROWS_PER_REPORT_MAX))
            self.report = [self._open.pop(place).row() for place in places]
        return bool(self.report)

    def stored(self, number: int) -> None:
        """The report of that number is in the ledger."""
        if number != self.number:
            return
        for row in self.report:
            spender = Spender(row.month, row.tenant, row.key)
            left = self._tokens.pop(spender, 0) - row.counts.tokens
            if left > 0:
                self._tokens[spender] = left
        self.report = []

    @property
    def counts_for_budgets(self) -> bool:
        """Whether a key with a budget has used what is not stored."""
        return any(row.monthly_tokens for row in self.report) or any(one.monthly_tokens for one in self._open.values())

    def tokens_of(self, spender: Spender) -> int:
        """Tokens that the ledger does not have yet."""
        return self._tokens.get(spender, 0)


RANKS_MAX: Final = 1024
"""GPUs that an engine may have, whatever a faulty worker says."""


def count_engine_seconds(
    used: Used, context: RequestContext, finished: RequestFinished, cluster: ClusterView, decoding: list[float] | None
) -> None:
    """Prefill and decode, each times the engine's ranks. Of a decode step, whose fixed cost all requests of the batch
    share, the request's share in the batch at its end; 0.0 for a worker that is gone. The prefill gives each completion
    its first token. ``decoding``: the decode worker's row of the fleet table when the request ended.
    """
    placement, prompt = context.placement, used.prompt_tokens
    assert placement is not None
    computing = placement.prefill or placement.decode
    elsewhere = finished.received_tokens if placement.prefill is None else -1
    fetched = max(0, finished.readback_tokens, elsewhere)
    computed = max(0, prompt - used.cached_tokens - fetched)
    first = decoding if computing is placement.decode else _numbers(cluster, computing)
    ranks = _ranks(placement.decode)
    again = max(0, finished.recomputed_tokens) + max(0, finished.reprefilled_tokens)
    used.prefill_s = _prefill_s(first, computed, prompt - computed) * _ranks(computing)
    used.prefill_s += _prefill_s(decoding, again, max(0, prompt - again)) * ranks
    used.decode_s = _decode_s(decoding, used, context.facts.sequences) * ranks


def _ranks(view: WorkerView) -> int:
    return max(1, min(view.record.ranks, RANKS_MAX))


def _numbers(cluster: ClusterView, view: WorkerView) -> list[float] | None:
    """The table's row of a worker that is not gone, as Python's floats: numpy's are several times slower."""
    alive = cluster.workers.get(view.record.worker_id) is view
    return cluster.table.of(view.row) if alive else None


def _prefill_s(n: list[float] | None, computed: int, before: int) -> float:
    return float(specification.work_s(n, computed, before)) if n is not None and computed else 0.0


def _decode_s(n: list[float] | None, used: Used, sequences: int) -> float:
    if n is None:
        return 0.0
    context_tokens = used.prompt_tokens + used.completion_tokens / 2
    batch = max(1.0, n[t.DECODING])
    step_s = n[t.DECODE_STEP_S] / batch + n[t.DECODE_REQUEST_S] + n[t.DECODE_CONTEXT_TOKEN_S] * context_tokens
    return step_s * max(0, used.completion_tokens - sequences)


log = logging.getLogger("baton.router")

REPORT_S: Final = 3.0
"""Seconds between two reports. What ended since the last one is lost when the router is killed."""
STORE_S_MAX: Final = 10.0
"""Seconds for a collector to store a report."""
UNSTORED_S_MAX: Final = 60.0
"""Seconds without a stored report after which the status says so, where budgets need it or usage is lost."""
CLOSE_S_MAX: Final = 2.0
"""Seconds for the last reports of a router that stops."""
DAY_S: Final = 86_400
CLIENT_GONE: Final = 499
CLIENT_ERROR: Final = 400


class UsageLog:
    """Counts every request once, when it ends."""

    def __init__(
        self, router_id: RouterId, bus: Bus, clock: Clock, cluster: ClusterView, catch_up: Callable[[], None]
    ) -> None:
        """``catch_up`` accounts for all requests that have ended."""
        self._router_id = router_id
        self._catch_up = catch_up
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
        self._catch_up()
        if self.unstored.uncounted:
            return f"no metrics collector stores usage: {self.unstored.uncounted} requests are not counted"
        if self.unstored.counts_for_budgets:
            return "no metrics collector stores usage: other routers do not see it for the budgets of API keys"
        return ""

    def numbers_of(self, view: WorkerView) -> list[float] | None:
        """The worker's row of the fleet table; None: it is gone."""
        return _numbers(self._cluster, view)

    def ended(
        self, context: RequestContext, finished: RequestFinished, used: tuple[int, int], decoding: list[float] | None
    ) -> None:
        """A request has ended. ``used``: its prompt and completion tokens. ``decoding``: the decode worker's numbers at
        that time.
        """
        client = context.http_request.head.client
        key = client.key
        place = (self._day(), key.tenant, client.label, self._model(context)[:NAME_CHARS_MAX])
        self.unstored.add(place, self._used(context, finished, used, decoding), key.monthly_tokens)

    def _day(self) -> str:
        number = int(self._clock.wall_s() // DAY_S)
        if number != self._today[0]:
            self._today = (number, day_of(number))
        return self._today[1]

    def _model(self, context: RequestContext) -> str:
        """The served model: a client may name any other, which must not become a row of the ledger."""
        model = context.model()
        return model if context.placement is not None or self._cluster.knows(model) else ""

    def _used(
        self, context: RequestContext, finished: RequestFinished, tokens: tuple[int, int], decoding: list[float] | None
    ) -> Used:
        status = finished.status
        cancelled = status == CLIENT_GONE
        failed = status >= CLIENT_ERROR and not cancelled
        used = Used(requests=1)
        used.failed, used.cancelled = int(failed), int(cancelled)
        prompt, completion = tokens
        if context.placement is None:  # It reached no worker, or is a prefetch: no engine has computed anything.
            used.prompt_tokens = bounded(prompt, COUNT_MAX)
            return used
        if failed and not _computed(context):
            return used
        used.prompt_tokens, used.completion_tokens = bounded(prompt, COUNT_MAX), bounded(completion, COUNT_MAX)
        used.cached_tokens = bounded(finished.cached_tokens, used.prompt_tokens)
        count_engine_seconds(used, context, finished, self._cluster, decoding)
        return used

    async def report(self) -> None:
        """Report until cancelled."""
        while True:
            await asyncio.sleep(REPORT_S)
            await self.report_now()

    async def report_now(self) -> None:
        """Report what is not stored yet; what cannot be stored now stays for the next time."""
        self._catch_up()
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


def bounded(count: int, count_max: int) -> int:
    """A count that a worker reports."""
    return max(0, min(count, count_max))


def day_of(number: int) -> str:
    """The date that many days after 1970 began, in UTC."""
    return datetime.fromtimestamp(number * DAY_S, UTC).date().isoformat()


def _computed(context: RequestContext) -> bool:
    """Whether an engine is known to have computed something of the present attempt."""
    return context.report is not None or context.prefill_report is not None or bool(context.relayed)


UNREAD_S_MAX: Final = 10.0
"""Seconds without the ledger after which the router's status says so."""
INSUFFICIENT_QUOTA: Final = "insufficient_quota"
NO_RETRY: Final = (b"x-should-retry", b"false")
"""Read by the clients of OpenAI and Anthropic, which would try a 429 again at once."""


class Budgets:
    """The month's spending of keys with a budget. ``follow`` keeps it current, once a key has one."""

    def __init__(self, bus: Bus, clock: Clock, unstored: UnstoredUsage, catch_up: Callable[[], None]) -> None:
        """``catch_up`` accounts for all requests that have ended."""
        self._bus = bus
        self._catch_up = catch_up
        self._clock = clock
        self._unstored = unstored
        self._wanted = asyncio.Event()
        self._unread_since = clock.now()
        self._is_read = False
        self._entries: dict[str, tuple[Spender, int]] = {}
        """Keys and their tokens, by entry of the ledger, in this month and later ones."""
        self._spent: dict[Spender, int] = {}
        self._newest_month = self._month()

    def keys_changed(self, keys: Iterable[Key]) -> None:
        """These keys are in force now."""
        wanted = any(key.monthly_tokens for key in keys)
        if wanted and not self._wanted.is_set():
            self._unread_since = self._clock.now()
            self._wanted.set()
        elif not wanted:
            self._wanted.clear()

    def refusal(self, client: ApiClient) -> HttpError | None:
        """429 when the client's key has used its budget; else None."""
        key = client.key
        if not key.monthly_tokens:
            return None
        self._catch_up()
        today = datetime.fromtimestamp(self._clock.wall_s(), UTC)
        spender = Spender(f"{today:%Y-%m}", key.tenant, client.label)
        used = self._spent.get(spender, 0) + self._unstored.tokens_of(spender) + client.charged_tokens
        return over_budget(key, used, today) if used >= key.monthly_tokens else None

    @property
    def failure(self) -> str:
        """What an operator must correct; empty when there is nothing."""
        if self._is_read or not self._wanted.is_set() or self._clock.now() - self._unread_since < UNREAD_S_MAX:
            return ""
        return "the usage ledger cannot be read: monthly budgets count only what this router has served"

    async def follow(self) -> None:
        """Watch the ledger until cancelled."""
        await self._wanted.wait()
        async for entry in watch_store(self._bus, USAGE):
            if entry is None:
                self._is_read = True
            else:
                self._heard(entry)

    def _heard(self, entry: StoredValue[UsageMonth]) -> None:
        self._forget(entry.key)
        month = self._month()
        if month != self._newest_month:
            self._newest_month = month
            for name in [name for name, (spender, _tokens) in self._entries.items() if spender.month < month]:
                self._forget(name)
        value = entry.value
        if value is not None and value.month >= month:
            spender, tokens = Spender(value.month, value.tenant, value.key), value.total.tokens
            self._entries[entry.key] = (spender, tokens)
            self._spent[spender] = self._spent.get(spender, 0) + tokens

    def _forget(self, name: str) -> None:
        spender, tokens = self._entries.pop(name, (None, 0))
        if spender is not None:
            left = self._spent.pop(spender, 0) - tokens
            if left > 0:
                self._spent[spender] = left

    def _month(self) -> str:
        return f"{datetime.fromtimestamp(self._clock.wall_s(), UTC):%Y-%m}"


def over_budget(key: Key, used: int, today: datetime) -> HttpError:
    """429 in OpenAI's form for a budget that is spent."""
    renewed = (today.replace(day=1) + timedelta(days=31)).replace(day=1).date()
    message = (
        f"This key has used its budget: {used:,} of {key.monthly_tokens:,} tokens in {today:%Y-%m}, running requests "
        f"included. The next budget begins on {renewed} at 00:00 UTC."
    )
    body = error_body(429, message, code=INSUFFICIENT_QUOTA, kind=INSUFFICIENT_QUOTA)
    return HttpError(429, body, reason="over_budget", more=(NO_RETRY,))
