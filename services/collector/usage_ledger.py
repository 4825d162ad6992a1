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

from shared.bus.port import (
    AskRefused,
    Bus,
    BusDown,
    BusError,
    Envelope,
    KeyValueStore,
    StoredValue,
    WrongRevision,
    watch_store,
)
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


def with_report(
    entry: UsageMonth | None, router_id: RouterId, number: int, rows: list[UsageRow], name: str = ""
) -> UsageMonth | None:
    """The entry with the report's rows, which are all its own; None if it contains that report already. ``name``: of a
    new entry, if it is not the rows' own.
    """
    newest = rows[-1]
    if entry is None:
        entry = UsageMonth(
            entry=name or newest.entry_id,
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
BLIND_TRIES_MAX = 3
"""An entry that so often in a row is there and cannot be read is unreadable, and not one that was just made."""
SUCCESSORS_MAX = 8
"""Entries beside one that cannot be read, each because the one before cannot be read either."""
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
        self._unreadable: dict[str, None] = {}
        """Entries that are there and cannot be read. They stay as they are; what belongs to them goes beside them."""
        self.failure = ""
        """Why the ledger takes no reports now; empty while it does."""

    @property
    def warning(self) -> str:
        """What an operator must correct; empty when there is nothing."""
        if self.failure or not self._unreadable:
            return self.failure
        first = next(iter(self._unreadable))
        return (
            f"{len(self._unreadable)} of the usage ledger's entries cannot be read ({first}): `baton usage` and budgets"
            " lack what is in them. They stay, and what is used from now on is counted beside them. The version of"
            " Baton that wrote them can read them; to give them up: nats kv del usage ENTRY"
        )

    async def listen(self) -> None:
        """Take the routers' reports."""
        await self._bus.answer(REPORT_USAGE, self._on_report)

    async def follow(self) -> None:
        """Watch the ledger until cancelled."""
        async for entry in watch_store(self._bus, USAGE):
            if entry is not None:
                self._heard(entry)

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
            blind_tries = 0
            for _try in range(TRIES_MAX):
                place = self._place_of(name)
                present = self._known.get(place) or await store.get(place)
                old = present.value if present is not None else None
                entry = with_report(old, report.router_id, report.number, rows, place)
                if entry is None:
                    return
                try:
                    revision = await (store.update(entry, present.revision) if present else store.create(entry))
                except WrongRevision:
                    self._known.pop(place, None)  # Another collector has written it.
                    blind_tries = 0 if present else blind_tries + 1
                    if blind_tries == BLIND_TRIES_MAX:
                        self._set_aside(place)
                        blind_tries = 0
                    continue
                self._heard(StoredValue(place, entry, revision))
                return
        raise BusDown(f"other collectors keep writing {name}")

    def _place_of(self, name: str) -> str:
        """The first readable entry among the named one and its successors. Raises BusDown if there is none."""
        places = (name, *(f"{name}-{number}" for number in range(2, SUCCESSORS_MAX + 2)))
        place = next((each for each in places if each not in self._unreadable), None)
        if place is None:
            raise BusDown(f"{name} and all entries beside it cannot be read")
        return place

    def _set_aside(self, place: str) -> None:
        """It cannot be read: another version of Baton may have written it, which will read it again. A report that was
        stored in it and is repeated now counts twice: at most one for each router.
        """
        self._unreadable[place] = None
        log.warning("the usage ledger's entry %s cannot be read; it stays, and usage is counted beside it", place)

    def _heard(self, entry: StoredValue[UsageMonth]) -> None:
        self._unreadable.pop(entry.key, None)
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
