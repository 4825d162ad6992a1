"""What this router's requests have used and the ledger does not have yet."""

from __future__ import annotations

import operator
from collections import Counter
from itertools import islice
from typing import Any, NamedTuple

from msgspec.structs import astuple

from shared.contracts.usage import MONTH_CHARS, ROWS_PER_REPORT_MAX, UsageCounts, UsageRow

ROWS_MAX = 10_000
"""Rows kept while no collector stores them. What would need a further row is not counted."""


class Spender(NamedTuple):
    """Whose budget of which month."""

    month: str
    tenant: str
    key: str


class Place(NamedTuple):
    """A row of the ledger."""

    day: str
    tenant: str
    key: str
    model: str


class _Sum:
    """Of the requests of one place."""

    __slots__ = ("counts", "monthly_tokens")

    def __init__(self, counts: tuple[float, ...], monthly_tokens: int) -> None:
        self.counts = counts
        """In the order of ``UsageCounts``."""
        self.monthly_tokens = monthly_tokens


class UnstoredUsage:
    """Adds up what requests used, and hands it out in numbered reports. A report stays the same until it is stored."""

    def __init__(self) -> None:
        self._open: dict[Place, _Sum] = {}
        self._tokens: Counter[Spender] = Counter()
        """Tokens."""
        self.number = 0
        """Of the present report."""
        self.report: list[UsageRow] = []
        """Handed out, and not stored yet."""
        self.uncounted = 0
        """Requests that found no room."""

    def add(self, place: Place, counts: UsageCounts, monthly_tokens: int) -> None:
        """A request has ended."""
        known = self._open.get(place)
        if known is not None:
            known.counts = tuple(map(operator.add, known.counts, astuple(counts)))
            known.monthly_tokens = monthly_tokens
        elif len(self._open) < ROWS_MAX:
            self._open[place] = _Sum(astuple(counts), monthly_tokens)
        else:
            self.uncounted += counts.requests
            return
        self._tokens[Spender(place.day[:MONTH_CHARS], place.tenant, place.key)] += counts.tokens

    def next_report(self) -> bool:
        """Put together ``report``, unless there is one. False: there is nothing to report."""
        if not self.report and self._open:
            self.number += 1
            places = list(islice(self._open, ROWS_PER_REPORT_MAX))
            self.report = [_row(place, self._open.pop(place)) for place in places]
        return bool(self.report)

    def stored(self, number: int) -> None:
        """The report of that number is in the ledger."""
        if number != self.number:
            return
        for row in self.report:
            spender = Spender(row.month, row.tenant, row.key)
            self._tokens[spender] -= row.counts.tokens
            if self._tokens[spender] <= 0:
                del self._tokens[spender]
        self.report = []

    @property
    def counts_for_budgets(self) -> bool:
        """Whether a key with a budget has used what is not stored."""
        return any(row.monthly_tokens for row in self.report) or any(one.monthly_tokens for one in self._open.values())

    def tokens_of(self, spender: Spender) -> int:
        """Tokens that the ledger does not have yet."""
        return self._tokens.get(spender, 0)


def _row(place: Place, known: _Sum) -> UsageRow:
    named: dict[str, Any] = dict(zip(UsageCounts.__struct_fields__, known.counts, strict=True))
    counts = UsageCounts(**named)
    return UsageRow(**place._asdict(), counts=counts, monthly_tokens=known.monthly_tokens)
