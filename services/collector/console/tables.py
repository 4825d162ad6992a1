"""The console's tables of what clients use: this month's tokens of their API keys, and their batches."""

from __future__ import annotations

from heapq import nlargest
from typing import NamedTuple

from services.collector.console.views import BatchRow, BatchTable, KeyUsage, UsageTable
from shared.contracts.batches import LineFault, StoredBatch
from shared.contracts.usage import UsageCounts, UsageMonth

KEYS_SHOWN_MAX = 50
"""Those with the most tokens are shown."""
ENTRIES_MAX = 50_000


class KeyMonth(NamedTuple):
    """What one key used of one model in one month."""

    entry: UsageMonth
    total: UsageCounts
    key_tokens: int
    """Of the key, with all models."""


class MonthUsage:
    """What each API key used of each model in one month, from the usage ledger."""

    def __init__(self) -> None:
        self._month = ""
        self._entries: dict[str, tuple[UsageMonth, UsageCounts]] = {}
        """Of the month and later ones, with their sums."""
        self._largest: list[KeyMonth] | None = None
        """None: must be found anew."""
        self._more = 0
        """Entries of the month that are not among the largest."""
        self._table: UsageTable | None = None
        """Of the largest."""

    def heard(self, name: str, entry: UsageMonth | None) -> None:
        """An entry of the ledger has changed; None: it is gone."""
        if entry is None:
            if self._entries.pop(name, None) is not None:
                self._largest = None
        elif entry.month >= self._month and (name in self._entries or len(self._entries) < ENTRIES_MAX):
            self._entries[name] = (entry, entry.total)
            self._largest = None

    def table(self, month: str) -> UsageTable:
        """Of this month in UTC; earlier ones are forgotten."""
        largest = self.largest(month)
        if self._table is None:
            self._table = UsageTable(month=month, rows=[_key_usage(*each) for each in largest], more=self._more)
        return self._table

    def largest(self, month: str) -> list[KeyMonth]:
        """The keys and models of this month in UTC with the most tokens; earlier months are forgotten."""
        if month != self._month:
            self._month, self._largest = month, None
            self._entries = {name: known for name, known in self._entries.items() if known[0].month >= month}
        if self._largest is None:
            self._largest, self._table = self._found(), None
        return self._largest

    def _found(self) -> list[KeyMonth]:
        present = [known for known in self._entries.values() if known[0].month == self._month]
        used: dict[tuple[str, str], int] = {}
        for entry, total in present:
            who = (entry.tenant, entry.key)
            used[who] = used.get(who, 0) + total.tokens
        largest = nlargest(KEYS_SHOWN_MAX, present, key=lambda known: known[1].tokens)
        self._more = len(present) - len(largest)
        return [KeyMonth(entry, total, used[entry.tenant, entry.key]) for entry, total in largest]


def _key_usage(entry: UsageMonth, total: UsageCounts, used: int) -> KeyUsage:
    prompt, budget = total.prompt_tokens, entry.monthly_tokens
    return KeyUsage(
        tenant=entry.tenant,
        key=entry.key,
        model=entry.model,
        requests=total.requests,
        failed=total.failed,
        prompt_tokens=prompt,
        cached_ratio=round(total.cached_tokens / prompt, 3) if prompt else None,
        completion_tokens=total.completion_tokens,
        engine_s=round(total.prefill_s + total.decode_s, 3),
        budget_tokens=budget or None,
        budget_used=round(used / budget, 3) if budget else None,
    )


BATCHES_SHOWN_MAX = 30
BATCHES_MAX = 20_000


class Batches:
    """All batches that routers keep, as far as there is room: those that run, then those that ended last."""

    def __init__(self) -> None:
        self._known: dict[str, BatchRow] = {}
        self._ended_at: dict[str, int] = {}
        """Of those that have ended, in seconds since 1970."""
        self._table: BatchTable | None = None
        """None: must be made anew."""

    def heard(self, key: str, batch: StoredBatch | None) -> None:
        """A batch has changed; None: it is gone."""
        self._table = None
        if batch is None:
            self._known.pop(key, None)
            self._ended_at.pop(key, None)
        elif key in self._known or len(self._known) < BATCHES_MAX:
            self._known[key] = _batch_row(batch)
            if batch.has_ended:
                self._ended_at[key] = batch.times.get(batch.status, batch.created_at)

    def table(self) -> BatchTable:
        if self._table is None:
            running = [key for key in self._known if key not in self._ended_at]
            running.sort(key=lambda key: self._known[key].created_at)
            ended = sorted(self._ended_at, key=lambda key: self._ended_at[key], reverse=True)
            keys = [*running, *ended]
            rows = [self._known[key] for key in keys[:BATCHES_SHOWN_MAX]]
            self._table = BatchTable(rows=rows, more=len(keys) - len(rows))
        return self._table


def _batch_row(batch: StoredBatch) -> BatchRow:
    return BatchRow(
        id=batch.id,
        tenant=batch.tenant,
        status=batch.status,
        created_at=batch.created_at,
        total=batch.total,
        completed=batch.progress.completed,
        failed=batch.progress.failed,
        router="" if batch.has_ended else batch.router_id,
        fault=_text(batch.faults[0]) if batch.faults else "",
    )


def _text(fault: LineFault) -> str:
    return f"line {fault.line}: {fault.message}" if fault.line is not None else fault.message
