"""`baton usage`: reads the usage ledger, sums it up, and prints a table, CSV or JSON lines."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Literal

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from services.launcher.bus_client import CommandFailed, open_bus
from services.launcher.terminal import Console
from shared.bus.port import BusDown
from shared.contracts.channels import USAGE
from shared.contracts.message import in_full
from shared.contracts.usage import UsageCounts, UsageMonth
from shared.text.formats import compact, long_duration

By = Literal["day", "month", "total"]

MONTH = re.compile(r"\d{4}-\d{2}")
NO_KEY, NO_MODEL = "(no key)", "(none)"
NEAR = 0.8
"""A share of a budget that is larger is highlighted."""


class UsageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What to show; empty texts match everything."""

    since: date
    until: date
    """The last day, which is included."""
    by: By = "total"
    tenant: str = ""
    key: str = ""
    """Name of the key; ``NO_KEY`` stands for requests without one."""
    model: str = ""

    def takes(self, entry: UsageMonth) -> bool:
        return (
            self.tenant in {"", entry.tenant}
            and self.key in {"", entry.key or NO_KEY}
            and self.model in {"", entry.model or NO_MODEL}
        )

    def months(self) -> tuple[str, ...]:
        """All that it touches."""
        first, last = (12 * day.year + day.month - 1 for day in (self.since, self.until))
        return tuple(f"{month // 12:04}-{month % 12 + 1:02}" for month in range(first, last + 1))

    def period(self, day: date) -> str:
        """Where the day counts."""
        if self.by == "day":
            return day.isoformat()
        return f"{day:%Y-%m}" if self.by == "month" else f"{self.since} to {self.until}"


class UsageLine(msgspec.Struct, frozen=True, kw_only=True):
    """What one key used of one model in one period."""

    period: str
    tenant: str
    key: str
    model: str
    counts: UsageCounts


class UsageBudget(msgspec.Struct, frozen=True, kw_only=True):
    """A key's budget for this month."""

    tenant: str
    key: str
    tokens: int
    monthly_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a query."""

    query: UsageQuery
    lines: list[UsageLine]
    budgets: list[UsageBudget]


def parse_day(text: str, *, last: bool = False) -> date:
    """A day, or the first (``last``: the last) day of a month. Raises ValueError."""
    if MONTH.fullmatch(text):
        first = date.fromisoformat(f"{text}-01")
        return (first + timedelta(days=31)).replace(day=1) - timedelta(days=1) if last else first
    return date.fromisoformat(text)


def today() -> date:
    """In UTC, as the ledger counts."""
    return datetime.now(UTC).date()


async def read_ledger(nats_url: str, months: tuple[str, ...]) -> list[UsageMonth]:
    """The ledger's entries of these months. Raises CommandFailed, and BusError when NATS does not respond."""
    async with open_bus(nats_url) as bus:
        try:
            store = await bus.key_value_store(USAGE)
        except BusDown as error:
            if not bus.connected:
                raise
            raise CommandFailed(
                "There is no usage ledger: an orchestrator makes it, and metrics collectors write it. "
                "Check that both run: `baton doctor`."
            ) from error
        entries = await store.all(months)
    return [one.value for one in entries if one.value is not None]


def summed(entries: Iterable[UsageMonth], query: UsageQuery, now: date) -> Usage:
    """The entries that the query takes, added up by period, key and model."""
    found: dict[tuple[str, str, str, str], UsageCounts] = {}
    taken = [entry for entry in entries if query.takes(entry)]
    for entry in taken:
        for number, counts in entry.days.items():
            day = _day(f"{entry.month}-{number}")
            if day is not None and query.since <= day <= query.until:
                place = (query.period(day), entry.tenant, entry.key, entry.model)
                found[place] = found.get(place, UsageCounts()) + counts
    lines = [
        UsageLine(period=period, tenant=tenant, key=key, model=model, counts=counts)
        for (period, tenant, key, model), counts in sorted(found.items())
    ]
    return Usage(query=query, lines=lines, budgets=_budgets(taken, f"{now:%Y-%m}"))


def _day(text: str) -> date | None:
    try:
        return date.fromisoformat(text)
    except ValueError:  # A router has reported an invalid date.
        return None


def _budgets(entries: Iterable[UsageMonth], month: str) -> list[UsageBudget]:
    """Budgets of keys, if the query covers all that counts."""
    tokens: dict[tuple[str, str], int] = {}
    budget: dict[tuple[str, str], int] = {}
    for entry in entries:
        if entry.month == month:
            who = (entry.tenant, entry.key)
            tokens[who] = tokens.get(who, 0) + entry.total.tokens
            budget[who] = max(budget.get(who, 0), entry.monthly_tokens)
    return [
        UsageBudget(tenant=tenant, key=key, tokens=tokens[tenant, key], monthly_tokens=limit)
        for (tenant, key), limit in sorted(budget.items())
        if limit
    ]


FIELDS = ("period", "tenant", "key", "model", *UsageCounts.__struct_fields__)


def to_csv(usage: Usage) -> str:
    """With a header; times in seconds."""
    out = io.StringIO()
    writer = csv.DictWriter(out, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(_record, usage.lines))
    return out.getvalue()


def to_jsonl(usage: Usage) -> str:
    """One object a line, with the same names as the CSV's columns."""
    return b"".join(msgspec.json.encode(_record(line)) + b"\n" for line in usage.lines).decode()


def _record(line: UsageLine) -> dict[str, object]:
    named = {"period": line.period, "tenant": line.tenant, "key": line.key, "model": line.model}
    counts = in_full(line.counts)
    return named | {name: round(each, 3) if isinstance(each, float) else each for name, each in counts.items()}


def draw(usage: Usage, console: Console) -> None:
    """A table with a total, and the budgets of this month."""
    for section in _sections(usage):
        console.print(section, highlight=False)


def _sections(usage: Usage) -> Iterator[RenderableType]:
    query = usage.query
    yield Text(f"Usage from {query.since} to {query.until}, days in UTC", "bold")
    if not usage.lines:
        yield Text("No requests were counted. Routers report theirs to the metrics collector every few seconds.")
        return
    yield _table(usage)
    if usage.budgets and not query.model:
        yield Text("\nBudgets of this month", "bold")
        for budget in usage.budgets:
            share = budget.tokens / budget.monthly_tokens
            style = "bold red" if share >= 1 else "yellow" if share > NEAR else ""
            of = f"{budget.tokens:,} of {budget.monthly_tokens:,} tokens"
            yield Text.assemble(f"  {_who(budget.tenant, budget.key)}: {of}, ", (f"{share:.0%}", style))


def _table(usage: Usage) -> Table:
    with_period = usage.query.by != "total"
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", show_footer=len(usage.lines) > 1)
    total = sum((line.counts for line in usage.lines), UsageCounts())
    if with_period:
        table.add_column(usage.query.by, no_wrap=True)
    table.add_column("key", "total", overflow="fold", min_width=8)
    table.add_column("model", overflow="fold", min_width=8)
    headings = ("requests", "failed", "prompt", "cached", "output", "engine")
    for heading, sum_of_all in zip(headings, _cells(total), strict=True):
        table.add_column(heading, sum_of_all, no_wrap=True, justify="right")
    for line in usage.lines:
        period = [line.period] if with_period else []
        table.add_row(*period, Text(_who(line.tenant, line.key)), Text(line.model or NO_MODEL), *_cells(line.counts))
    return table


def _cells(counts: UsageCounts) -> list[str]:
    cached = f"{counts.cached_tokens / counts.prompt_tokens:.0%}" if counts.prompt_tokens else "-"
    tokens = [compact(counts.prompt_tokens), cached, compact(counts.completion_tokens)]
    return [
        compact(counts.requests),
        compact(counts.failed),
        *tokens,
        long_duration(counts.prefill_s + counts.decode_s),
    ]


def _who(tenant: str, key: str) -> str:
    return f"{tenant}/{key}" if key else NO_KEY
