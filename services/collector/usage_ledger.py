"""The usage ledger: an entry and a report make the next entry, which this collector stores.

Several collectors may store the same report at the same time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Callable, Iterable

import msgspec
from msgspec.structs import astuple

from shared.bus.port import AskRefused, Bus, BusDown, BusError, Envelope, KeyValueStore, StoredValue, WrongRevision
from shared.contracts.channels import REPORT_USAGE, USAGE
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import RouterId, is_subject_token
from shared.contracts.usage import (
    COUNT_MAX,
    MONTH_CHARS,
    NAME_CHARS_MAX,
    ReportUsage,
    UsageCounts,
    UsageMonth,
    UsageRow,
    UsageStored,
)

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


log = logging.getLogger(__name__)

WRITES_AT_ONCE = 8
TRIES_MAX = 16
"""For one entry, which other collectors may be writing."""
RETRY_S = 2.0
"""After the ledger could not be read."""
ENTRIES_MAX = 50_000
"""Entries held in memory; further ones are read when they are needed, and the console does not show them."""


class LedgerStore:
    """The ledger as this collector knows it, and its only writer."""

    def __init__(self, bus: Bus, changed: Callable[[str, UsageMonth | None], None]) -> None:
        """``changed``: called with each entry's name and new value; None: it is gone."""
        self._bus = bus
        self._changed = changed
        self._known: dict[str, StoredValue[UsageMonth]] = {}
        self._one_report = asyncio.Lock()
        self._writing = asyncio.Semaphore(WRITES_AT_ONCE)
        self.failure = ""
        """Why the ledger takes no reports now; empty while it does."""

    async def listen(self) -> None:
        """Take the routers' reports."""
        await self._bus.answer(REPORT_USAGE, self._on_report)

    async def follow(self) -> None:
        """Watch the ledger until cancelled."""
        while True:
            try:
                store = await self._bus.key_value_store(USAGE)
                async for entry in store.watch():
                    if entry is not None:
                        self._heard(entry)
            except BusError as error:
                log.debug("the usage ledger could not be read: %s", error)
            await asyncio.sleep(RETRY_S)

    async def _on_report(self, report: ReportUsage, _envelope: Envelope) -> UsageStored:
        try:
            async with self._one_report:
                await self._store(report)
        except BusError as error:
            self._failed(str(error))
            raise AskRefused(Failure(reason=Reason.BUS_DOWN, message=str(error))) from error
        self.failure = ""
        return UsageStored(router_id=report.router_id, number=report.number)

    async def _store(self, report: ReportUsage) -> None:
        if not is_reportable(report.router_id, report.number):
            log.warning("a report of usage without a router's id and number was dropped")
            return
        store = await self._bus.key_value_store(USAGE)
        writes = [self._add(store, entry, rows, report) for entry, rows in by_entry(report.rows).items()]
        # All end before the report counts as failed: the router repeats it.
        ended = await asyncio.gather(*writes, return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error

    async def _add(
        self, store: KeyValueStore[UsageMonth], name: str, rows: list[UsageRow], report: ReportUsage
    ) -> None:
        async with self._writing:
            for _try in range(TRIES_MAX):
                present = self._known.get(name) or await store.get(name)
                entry = with_report(
                    present.value if present is not None else None, report.router_id, report.number, rows
                )
                if entry is None:
                    return
                try:
                    revision = await (store.update(entry, present.revision) if present else store.create(entry))
                except WrongRevision:
                    self._known.pop(name, None)  # Another collector has written it.
                    continue
                self._heard(StoredValue(name, entry, revision))
                return
        raise BusDown(f"other collectors keep writing {name}")

    def _heard(self, entry: StoredValue[UsageMonth]) -> None:
        known = self._known.get(entry.key)
        if entry.value is None:
            self._known.pop(entry.key, None)
        elif known is None and len(self._known) >= ENTRIES_MAX:
            return
        elif known is None or known.revision < entry.revision:
            self._known[entry.key] = entry
        else:
            return
        self._changed(entry.key, entry.value)

    def _failed(self, why: str) -> None:
        if not self.failure:
            log.warning("usage cannot be stored; routers keep it and try again: %s", why)
        self.failure = f"the usage ledger cannot be written: {why}"
