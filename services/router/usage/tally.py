"""What this router's requests have used and the ledger does not have yet."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import NamedTuple

import msgspec

from shared.contracts.usage import ROWS_PER_REPORT_MAX, UsageRow

ROWS_MAX = 10_000
"""Rows kept while no collector stores them. What would need a further row is not counted."""


class Spender(NamedTuple):
    """Whose budget of which month."""

    month: str
    tenant: str
    key: str


class UsageTally:
    """Adds up rows, and hands them out in numbered reports. A report stays the same until it is stored."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str, str, str], UsageRow] = {}
        """By day, tenant, key and model."""
        self._unstored: Counter[Spender] = Counter()
        """Tokens."""
        self.number = 0
        """Of the present report."""
        self.report: list[UsageRow] = []
        """Handed out, and not stored yet."""
        self.uncounted = 0
        """Requests that found no room."""

    def add(self, row: UsageRow) -> None:
        """A request has ended."""
        place = (row.day, row.tenant, row.key, row.model)
        before = self._open.get(place)
        if before is None and len(self._open) >= ROWS_MAX:
            self.uncounted += row.counts.requests
            return
        self._open[place] = row if before is None else msgspec.structs.replace(row, counts=before.counts + row.counts)
        self._unstored[spender_of(row)] += row.counts.tokens

    def next_report(self) -> bool:
        """Put together ``report``, unless there is one. False: there is nothing to report."""
        if not self.report and self._open:
            self.number += 1
            places = list(islice(self._open, ROWS_PER_REPORT_MAX))
            self.report = [self._open.pop(place) for place in places]
        return bool(self.report)

    def stored(self, number: int) -> None:
        """The report of that number is in the ledger."""
        if number != self.number:
            return
        for row in self.report:
            spender = spender_of(row)
            self._unstored[spender] -= row.counts.tokens
            if self._unstored[spender] <= 0:
                del self._unstored[spender]
        self.report = []

    @property
    def counts_for_budgets(self) -> bool:
        """Whether a key with a budget has used what is not stored."""
        return any(row.monthly_tokens for row in self.report) or any(row.monthly_tokens for row in self._open.values())

    def unstored(self, spender: Spender) -> int:
        """Tokens that the ledger does not have yet."""
        return self._unstored.get(spender, 0)


def spender_of(row: UsageRow) -> Spender:
    """Whose budget the row counts against."""
    return Spender(row.month, row.tenant, row.key)
