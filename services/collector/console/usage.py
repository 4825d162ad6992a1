"""The console's table of this month's usage: per API key and model, from the usage ledger."""

from __future__ import annotations

from heapq import nlargest

from services.collector.console.views import KeyUsage, UsageTable
from shared.contracts.usage import UsageCounts, UsageMonth

ROWS_MAX = 50
"""Those with the most tokens are shown."""
ENTRIES_MAX = 50_000


class MonthUsage:
    """What is known of one month."""

    def __init__(self) -> None:
        self._month = ""
        self._entries: dict[str, tuple[UsageMonth, UsageCounts]] = {}
        """Of the month and later ones, with their sums."""
        self._table: UsageTable | None = None
        """None: must be made anew."""

    def heard(self, name: str, entry: UsageMonth | None) -> None:
        """An entry of the ledger has changed; None: it is gone."""
        if entry is None:
            if self._entries.pop(name, None) is not None:
                self._table = None
        elif entry.month >= self._month and (name in self._entries or len(self._entries) < ENTRIES_MAX):
            self._entries[name] = (entry, entry.total)
            self._table = None

    def table(self, month: str) -> UsageTable:
        """Of this month in UTC; earlier ones are forgotten."""
        if month != self._month:
            self._month, self._table = month, None
            self._entries = {name: known for name, known in self._entries.items() if known[0].month >= month}
        if self._table is None:
            self._table = self._made()
        return self._table

    def _made(self) -> UsageTable:
        present = [known for known in self._entries.values() if known[0].month == self._month]
        used: dict[tuple[str, str], int] = {}
        for entry, total in present:
            who = (entry.tenant, entry.key)
            used[who] = used.get(who, 0) + total.tokens
        largest = nlargest(ROWS_MAX, present, key=lambda known: known[1].tokens)
        rows = [_row(entry, total, used[entry.tenant, entry.key]) for entry, total in largest]
        return UsageTable(month=self._month, rows=rows, more=len(present) - len(rows))


def _row(entry: UsageMonth, total: UsageCounts, used: int) -> KeyUsage:
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
        engine_s=round(total.prefill_s + total.decode_s, 1),
        budget_tokens=budget or None,
        budget_used=round(used / budget, 3) if budget else None,
    )
