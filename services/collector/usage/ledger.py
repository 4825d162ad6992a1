"""The arithmetic of the usage ledger: an entry and a report make the next entry."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import msgspec
from msgspec.structs import astuple

from shared.contracts.ids import RouterId, is_subject_token
from shared.contracts.usage import COUNT_MAX, MONTH_CHARS, NAME_CHARS_MAX, UsageCounts, UsageMonth, UsageRow

ROUTERS_MAX = 256
"""Routers whose last report an entry remembers: those that reported last. A router is forgotten long after its end."""
DAY = re.compile(r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])")
ROW_COUNT_MAX = COUNT_MAX << 8


def is_valid(row: UsageRow) -> bool:
    """Whether the row can be added."""
    names = (row.tenant, row.key, row.model)
    return (
        DAY.fullmatch(row.day) is not None
        and all(len(name) <= NAME_CHARS_MAX for name in names)
        and 0 <= row.monthly_tokens <= ROW_COUNT_MAX
        and all(0 <= count <= ROW_COUNT_MAX and math.isfinite(count) for count in astuple(row.counts))
    )


def by_entry(rows: Iterable[UsageRow]) -> dict[str, list[UsageRow]]:
    """The valid rows, by the entry that they belong to."""
    found: dict[str, list[UsageRow]] = {}
    for row in rows:
        if is_valid(row):
            found.setdefault(row.entry_id, []).append(row)
    return found


def with_report(entry: UsageMonth | None, router_id: RouterId, number: int, rows: list[UsageRow]) -> UsageMonth | None:
    """The entry with the report's rows, which are all its own; None if it contains that report already."""
    newest = rows[-1]
    if entry is None:
        entry = UsageMonth(
            entry=newest.entry_id,
            month=newest.month,
            tenant=newest.tenant,
            key=newest.key,
            model=newest.model,
            days={},
            stored={},
        )
    if entry.stored.get(router_id, 0) >= number:
        return None
    days = dict(entry.days)
    for row in rows:
        day = row.day[MONTH_CHARS + 1 :]
        days[day] = days.get(day, UsageCounts()) + row.counts
    others = [(router, last) for router, last in entry.stored.items() if router != router_id]
    stored = dict([*others, (router_id, number)][-ROUTERS_MAX:])
    return msgspec.structs.replace(entry, days=days, stored=stored, monthly_tokens=newest.monthly_tokens)


def is_reportable(router_id: str, number: int) -> bool:
    """Whether a report can be told from its repetitions."""
    return is_subject_token(router_id) and number > 0
