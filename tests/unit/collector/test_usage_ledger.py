"""The usage ledger: every report counts once, whatever is repeated, killed or stored by several collectors."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.collector.console.tables import KEYS_SHOWN_MAX, MonthUsage
from services.collector.metrics.exposition import usage_families
from services.collector.usage_ledger import ROUTERS_MAX, LedgerStore, by_entry, is_valid, with_report
from shared.bus.jetstream import VALUE_BYTES_MAX
from shared.bus.port import AskRefused
from shared.bus.wire import pack
from shared.contracts.channels import REPORT_USAGE, USAGE
from shared.contracts.ids import RouterId
from shared.contracts.usage import COUNT_MAX, ReportUsage, UsageCounts, UsageRow
from shared.telemetry.prometheus import to_prometheus
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.virtual_time import in_virtual_time

R1, R2 = RouterId("router-1"), RouterId("router-2")
ASK_S_MAX = 10.0


def row(day="2026-11-23", key="k", model="m", **counts) -> UsageRow:
    return UsageRow(day=day, tenant="acme", key=key, model=model, counts=UsageCounts(requests=1, **counts))


def test_a_report_is_added_once():
    first = with_report(None, R1, 1, [row(prompt_tokens=10, prefill_s=0.5)])
    second = with_report(first, R1, 2, [row(prompt_tokens=5), row("2026-11-24", completion_tokens=3)])

    assert with_report(second, R1, 2, [row(prompt_tokens=5)]) is None
    assert with_report(second, R1, 1, [row(prompt_tokens=5)]) is None
    assert second.days == {
        "23": UsageCounts(requests=2, prompt_tokens=15, prefill_s=0.5),
        "24": UsageCounts(requests=1, completion_tokens=3),
    }
    assert (second.month, second.tenant, second.key, second.model) == ("2026-11", "acme", "k", "m")
    assert second.total.tokens == 18


@given(st.lists(st.tuples(st.sampled_from([R1, R2]), st.integers(1, 50), st.integers(1, 3)), max_size=30))
def test_repeated_reports_change_no_sum(reports):
    entry, numbers, tokens = None, {R1: 0, R2: 0}, 0
    for router, used, times in reports:
        numbers[router] += 1
        tokens += used
        for _ in range(times):
            entry = with_report(entry, router, numbers[router], [row(prompt_tokens=used)]) or entry

    assert (entry.total if entry else UsageCounts()).tokens == tokens


def test_an_entry_of_a_long_month_with_many_routers_fits_into_a_value():
    entry = None
    for number in range(2 * ROUTERS_MAX):
        big = row(
            f"2026-10-{1 + number % 31:02}", "k" * 128, "m" * 256, prompt_tokens=COUNT_MAX, cached_tokens=COUNT_MAX,
            completion_tokens=COUNT_MAX, failed=COUNT_MAX, cancelled=COUNT_MAX, prefill_s=0.1, decode_s=0.1,
        )  # fmt: skip
        entry = with_report(entry, RouterId(f"router-{'x' * 40}-{number:08}"), 1, [big])

    assert len(entry.stored) == ROUTERS_MAX
    assert len(pack(entry)) < VALUE_BYTES_MAX


@pytest.mark.parametrize(
    "wrong",
    [
        {"day": "2026-13-01"},
        {"day": "23.11.2026"},
        {"day": "2026-11-23\n"},
        {"model": "m" * 257},
        {"counts": UsageCounts(prompt_tokens=-1)},
        {"counts": UsageCounts(completion_tokens=1 << 62)},
        {"counts": UsageCounts(prefill_s=float("nan"))},
        {"counts": UsageCounts(decode_s=float("inf"))},
    ],
)
def test_rows_that_cannot_be_right_are_dropped(wrong):
    good = row()
    bad = msgspec.structs.replace(good, **wrong)

    assert not is_valid(bad)
    assert by_entry([good, bad]) == {good.entry_id: [good]}


class Ledger:
    """Collectors on one bus."""

    def __init__(self) -> None:
        self.hub = MemoryHub()
        self.bus = MemoryBus(self.hub)

    async def collector(self) -> tuple[MemoryBus, LedgerStore]:
        bus = MemoryBus(self.hub)
        store = LedgerStore(bus, lambda _name, _entry: None)
        await store.listen()
        return bus, store

    async def report(self, number: int, *rows: UsageRow, router: RouterId = R1) -> None:
        report = ReportUsage(router_id=router, number=number, rows=list(rows))
        stored = await self.bus.ask(REPORT_USAGE, report, timeout_s=ASK_S_MAX)
        assert stored.number == number

    async def tokens(self) -> dict[tuple[str, str], int]:
        entries = await (await self.bus.key_value_store(USAGE)).all()
        return {(one.value.key, one.value.model): one.value.total.tokens for one in entries}


@in_virtual_time
async def test_two_collectors_store_each_report_once():
    ledger = Ledger()
    await ledger.collector()
    await ledger.collector()

    for number in range(1, 6):
        rows = [row(key=key, prompt_tokens=10) for key in ("a", "b", "c")]
        await asyncio.gather(ledger.report(number, *rows), ledger.report(number, *rows, router=R2))
    await asyncio.sleep(1)

    assert await ledger.tokens() == {("a", "m"): 100, ("b", "m"): 100, ("c", "m"): 100}


@in_virtual_time
async def test_the_next_collector_goes_on_where_one_was_killed():
    ledger = Ledger()
    first, _store = await ledger.collector()
    await ledger.report(1, row(prompt_tokens=10))
    await first.close()
    await ledger.collector()

    await ledger.report(1, row(prompt_tokens=10))  # Stored, but the router has not heard so.
    await ledger.report(2, row(prompt_tokens=5))

    assert await ledger.tokens() == {("k", "m"): 15}


@in_virtual_time
async def test_a_collector_reads_an_entry_again_that_another_has_written():
    ledger = Ledger()
    first, _store = await ledger.collector()
    await ledger.report(1, row(prompt_tokens=10))
    first.connected = False
    second, _store = await ledger.collector()
    await ledger.report(2, row(prompt_tokens=5))
    await second.close()
    first.connected = True

    await ledger.report(3, row(prompt_tokens=2))

    assert await ledger.tokens() == {("k", "m"): 17}


@in_virtual_time
async def test_an_entry_that_cannot_be_read_stays_and_holds_up_no_report():
    ledger = Ledger()
    _bus, store = await ledger.collector()
    mine, other = row(prompt_tokens=10), row(key="other", prompt_tokens=1)
    bucket = ledger.hub.buckets["usage"]
    bucket.store(mine.entry_id, b"of a later version")

    await ledger.report(1, mine, other)
    await ledger.report(2, mine, other)
    await ledger.report(2, mine, other)

    assert bucket.values[mine.entry_id].payload == b"of a later version"
    assert await ledger.tokens() == {("k", "m"): 20, ("other", "m"): 2}
    assert f"1 of the usage ledger's entries cannot be read ({mine.entry_id})" in store.warning

    following = asyncio.create_task(store.follow())
    repaired = with_report(None, R1, 1, [row(prompt_tokens=100)])
    await (await ledger.bus.key_value_store(USAGE)).put(repaired)
    await asyncio.sleep(1)
    await ledger.report(3, mine)
    following.cancel()

    entries = await (await ledger.bus.key_value_store(USAGE)).all((mine.entry_id,))
    assert sorted(one.value.total.tokens for one in entries) == [20, 110]
    assert store.warning == ""


@in_virtual_time
async def test_a_report_that_cannot_be_stored_is_refused_and_the_status_says_so():
    ledger = Ledger()
    bus, store = await ledger.collector()
    bus.connected = False
    failure = ""
    try:
        await store._on_report(ReportUsage(router_id=R1, number=1, rows=[row()]), None)
    except AskRefused:
        failure = store.failure
    bus.connected = True
    await ledger.report(1, row(prompt_tokens=4))

    assert "cannot be written" in failure
    assert store.failure == ""
    assert await ledger.tokens() == {("k", "m"): 4}


def test_the_console_shows_this_month_and_each_keys_share_of_its_budget():
    usage = MonthUsage()
    for entry in (
        with_report(None, R1, 1, [budgeted(row(prompt_tokens=300, cached_tokens=150, prefill_s=1.0, decode_s=0.5))]),
        with_report(None, R1, 1, [budgeted(row(model="other", prompt_tokens=400))]),
        with_report(None, R1, 1, [row(key="free", prompt_tokens=500)]),
        with_report(None, R1, 1, [row("2026-10-31", prompt_tokens=900)]),
    ):
        usage.heard(entry.entry, entry)

    table = usage.table("2026-11")

    shown = [(one.key, one.model, one.prompt_tokens, one.budget_used) for one in table.rows]
    assert shown == [("free", "m", 500, None), ("k", "other", 400, 0.7), ("k", "m", 300, 0.7)]
    assert (table.rows[2].cached_ratio, table.rows[2].engine_s) == (0.5, 1.5)
    assert usage.table("2026-11") is table
    assert usage.table("2026-12").rows == []
    assert usage.table("2026-11").rows == []  # forgotten


def test_the_console_shows_the_largest_rows_and_counts_the_others():
    usage = MonthUsage()
    for number in range(KEYS_SHOWN_MAX + 7):
        entry = with_report(None, R1, 1, [row(key=f"k{number}", prompt_tokens=number)])
        usage.heard(entry.entry, entry)
    usage.heard(entry.entry, None)

    table = usage.table("2026-11")

    assert (len(table.rows), table.more, table.rows[0].key) == (KEYS_SHOWN_MAX, 6, f"k{KEYS_SHOWN_MAX + 5}")


def budgeted(one: UsageRow) -> UsageRow:
    return msgspec.structs.replace(one, monthly_tokens=1000)


def test_metrics_have_this_months_usage_and_the_share_of_budgets():
    usage = MonthUsage()
    for entry in (
        with_report(None, R1, 1, [budgeted(row(prompt_tokens=300, cached_tokens=150, prefill_s=1.5))]),
        with_report(None, R1, 1, [budgeted(row(model="other", completion_tokens=400))]),
        with_report(None, R1, 1, [row(key="free", prompt_tokens=500)]),
    ):
        usage.heard(entry.entry, entry)

    page = to_prometheus(usage_families(usage.largest("2026-11")))[0].decode()

    shown = {line for line in page.splitlines() if line and not line.startswith("#") and not line.endswith(" 0.0")}
    k, free, other = (
        {"key": key, "model": model, "tenant": "acme"} for key, model in (("k", "m"), ("free", "m"), ("k", "other"))
    )

    def sample(name: str, value: float, **labels: str) -> str:
        pairs = ",".join(f'{each}="{labels[each]}"' for each in sorted(labels))
        return f"{name}{{{pairs}}} {value}"

    assert shown == {
        sample("baton_usage_month_tokens", 300.0, **k, kind="prompt"),
        sample("baton_usage_month_tokens", 150.0, **k, kind="cached"),
        sample("baton_usage_month_tokens", 400.0, **other, kind="completion"),
        sample("baton_usage_month_tokens", 500.0, **free, kind="prompt"),
        *(sample("baton_usage_month_requests", 1.0, **each) for each in (k, free, other)),
        sample("baton_usage_month_engine_seconds", 1.5, **k),
        sample("baton_usage_budget_used_ratio", 0.7, tenant="acme", key="k"),
    }
