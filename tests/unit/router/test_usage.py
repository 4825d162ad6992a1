"""What a router counts for the usage ledger and reports; budgets of keys: what counts, and what a client is told."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec
import pytest

from services.collector.usage_ledger import LedgerStore
from services.router.auth.key_file import keyring_of
from services.router.settings import Settings
from services.router.usage import (
    REPORT_S,
    ROWS_MAX,
    UNREAD_S_MAX,
    UNSTORED_S_MAX,
    Budgets,
    Spender,
    UnstoredUsage,
    Used,
)
from shared.bus.port import AskRefused, BusDown
from shared.contracts.api_keys import digest_of
from shared.contracts.channels import REPORT_USAGE, USAGE
from shared.contracts.control import ServicePhase, ServiceStatus
from shared.contracts.failures import Failure, Reason
from shared.contracts.inference import LegReport
from shared.contracts.usage import (
    ROWS_PER_REPORT_MAX,
    ReportUsage,
    UsageCounts,
    UsageMonth,
    UsageRow,
    UsageStored,
    entry_id,
)
from shared.runtime.settings import SettingsError
from tests.support.memory_bus import MemoryBus
from tests.support.virtual_time import LoopClock
from tests.unit.router.relay.test_charging import held
from tests.unit.router.world import World, in_world, run_in_world

KEYS = f'salt = "{"s" * 32}"\n[[key]]\ntenant = "acme"\nname = "ci"\nsha256 = "{digest_of(b"k")}"\n'
NAMELESS = KEYS.replace('name = "ci"\n', "")
PROMPT = {"model": "m", "prompt": [1, 2, 3, 4], "max_tokens": 3}


def add(usage: UnstoredUsage, key="k", prompt_tokens=10) -> None:
    used = Used(requests=1)
    used.prompt_tokens, used.prefill_s = prompt_tokens, 0.5
    usage.add(("2026-11-23", "acme", key, "m"), used, 100)


@dataclass
class Collector:
    """Stores reports, or refuses them while ``refuses``."""

    refuses: bool = False
    reports: list[ReportUsage] = field(default_factory=list)

    async def open(self, world: World) -> None:
        await MemoryBus(world.hub).answer(REPORT_USAGE, self._take)

    async def _take(self, report: ReportUsage, _envelope) -> UsageStored:
        self.reports.append(report)
        if self.refuses:
            raise AskRefused(Failure(reason=Reason.BUS_DOWN, message="no ledger"))
        return UsageStored(router_id=report.router_id, number=report.number)

    def rows(self) -> list[UsageRow]:
        return [one for report in self.reports for one in report.rows]


@pytest.mark.parametrize("ranks", [1, 4])
@in_world(keys=KEYS)
async def test_a_served_request_is_counted_for_its_key_and_model(world: World, ranks):
    def counted(_worker, _start, frames) -> None:
        frames.head(200, "application/json")
        frames.data(b"{}")
        frames.end(LegReport(prompt_tokens=1000, completion_tokens=100, cached_tokens=200))

    collector = Collector()
    await collector.open(world)
    await world.worker("w1", script=counted, ranks=ranks)

    assert (await world.ask(PROMPT, x_api_key="k")).status == 200
    await asyncio.sleep(REPORT_S + 0.5)

    (one,) = collector.rows()
    counts = one.counts
    assert (one.tenant, one.key, one.model) == ("acme", "ci", "m")
    assert (counts.requests, counts.failed, counts.cancelled) == (1, 0, 0)
    assert (counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens) == (1000, 200, 100)
    # The speeds that are assumed of an engine before it is measured: 800 tokens at 4,000/s, 99 steps of 15 ms.
    assert counts.prefill_s == pytest.approx(ranks * 0.2, rel=0.2)
    assert counts.decode_s == pytest.approx(ranks * 1.5, rel=0.2)


@in_world(keys=NAMELESS)
async def test_without_a_name_the_key_is_shown_by_the_beginning_of_its_digest(world: World):
    collector = Collector()
    await collector.open(world)
    await world.worker("w1")
    await world.ask(PROMPT, x_api_key="k")
    await world.router.usage.report_now()

    assert collector.rows()[0].key == digest_of(b"k")[:12]


@in_world()
async def test_without_keys_neither_tenant_nor_unknown_model_of_a_client_makes_a_row(world: World):
    collector = Collector()
    await collector.open(world)
    await world.worker("w1")
    await world.ask(PROMPT, x_baton_tenant="made-up")
    await world.ask({**PROMPT, "model": "made-up"}, x_baton_tenant="another")
    await world.router.usage.report_now()

    found = [(one.tenant, one.key, one.model, one.counts.requests, one.counts.failed) for one in collector.rows()]
    assert sorted(found) == [("", "", "", 1, 1), ("", "", "m", 1, 0)]


@in_world()
async def test_a_client_that_leaves_is_cancelled_and_counts_what_was_computed(world: World):
    def held(_worker, _start, frames) -> None:
        frames.head(200, "text/event-stream")

    collector = Collector()
    await collector.open(world)
    await world.worker("w1", script=held)
    connection, answering = world.begin(msgspec.json.encode({**PROMPT, "stream": True}))
    await asyncio.sleep(1)
    connection.leave()
    await answering
    await world.router.usage.report_now()

    (one,) = collector.rows()
    assert (one.counts.cancelled, one.counts.failed) == (1, 0)
    assert one.counts.prompt_tokens > 0  # As the router estimates it: the engine has reported nothing.


@in_world()
async def test_a_request_that_the_engine_refuses_has_failed_and_used_nothing(world: World):
    def refused(_worker, _start, frames) -> None:
        frames.head(400, "application/json")
        frames.data(b"{}")
        frames.end(LegReport(prompt_tokens=-1, completion_tokens=-1))

    collector = Collector()
    await collector.open(world)
    await world.worker("w1", script=refused)
    assert (await world.ask(PROMPT)).status == 400
    await world.router.usage.report_now()

    assert collector.rows()[0].counts == UsageCounts(requests=1, failed=1)


@in_world()
async def test_a_report_is_repeated_unchanged_until_it_is_stored(world: World):
    collector = Collector(refuses=True)
    await collector.open(world)
    await world.worker("w1")
    await world.ask(PROMPT)
    await world.router.usage.report_now()
    await world.ask(PROMPT)
    await world.router.usage.report_now()
    collector.refuses = False
    await world.router.usage.report_now()

    first, again, stored, rest = collector.reports
    assert first == again == stored
    assert (rest.number, rest.rows[0].counts.requests) == (first.number + 1, 1)


def test_a_router_that_stops_reports_its_last_requests():
    collector = Collector()

    async def scenario(world: World) -> None:
        await collector.open(world)
        await world.worker("w1")
        await world.ask(PROMPT)

    run_in_world(scenario)
    assert [one.counts.requests for one in collector.rows()] == [1]


def test_unstored_usage_is_bounded_and_counts_what_it_drops():
    usage = UnstoredUsage()
    for number in range(ROWS_MAX + 5):
        add(usage, f"k{number}")
    add(usage, "k0")

    assert usage.uncounted == 5
    assert usage.next_report()
    assert len(usage.report) == ROWS_PER_REPORT_MAX
    assert usage.report[0] == UsageRow(
        day="2026-11-23", tenant="acme", key="k0", model="m", monthly_tokens=100,
        counts=UsageCounts(requests=2, prompt_tokens=20, prefill_s=1.0),
    )  # fmt: skip


def test_what_is_not_stored_counts_until_its_own_report_is_stored():
    usage, spender = UnstoredUsage(), Spender("2026-11", "acme", "k")
    add(usage)
    usage.next_report()
    add(usage, prompt_tokens=5)

    assert usage.tokens_of(spender) == 15
    usage.stored(usage.number)
    assert usage.tokens_of(spender) == 5
    usage.next_report()
    usage.stored(usage.number - 1)  # a late reply to the first
    assert usage.tokens_of(spender) == 5
    assert usage.tokens_of(Spender("2026-12", "acme", "k")) == 0


BUDGET = 10_000
KEY = '[[key]]\ntenant = "acme"\nname = "{}"\nsha256 = "{}"\n{}\n'
BUDGETED = f'salt = "{"s" * 32}"\n' + "".join([
    KEY.format("ci", digest_of(b"k"), f"monthly_tokens = {BUDGET}"),
    KEY.format("free", digest_of(b"free"), ""),
])  # fmt: skip


def month_of(world: World) -> str:
    return f"{datetime.fromtimestamp(world.router.clock.wall_ms() / 1000, UTC):%Y-%m}"


def spent(month: str, tokens: int, key: str = "ci", model: str = "m") -> UsageMonth:
    days = {"01": UsageCounts(requests=1, prompt_tokens=tokens - 1, completion_tokens=1)}
    entry = entry_id(month, "acme", key, model)
    return UsageMonth(entry=entry, month=month, tenant="acme", key=key, model=model, days=days, stored={})


async def put(world: World, *entries: UsageMonth) -> None:
    store = await MemoryBus(world.hub).key_value_store(USAGE)
    for entry in entries:
        await store.put(entry)
    await asyncio.sleep(0.1)


async def ask(world: World, key: str = "k", **more) -> int:
    return (await world.ask({**PROMPT, **more}, x_api_key=key)).status


def using(tokens: int):
    def script(_worker, _start, frames) -> None:
        frames.head(200, "application/json")
        frames.data(b"{}")
        frames.end(LegReport(prompt_tokens=tokens - 1, completion_tokens=1))

    return script


@in_world(keys=BUDGETED)
async def test_a_key_that_has_used_its_budget_is_refused_with_the_day_of_the_next(world: World):
    w1 = await world.worker("w1")
    month = month_of(world)
    await put(world, spent(month, 4_000), spent("1969-12", 9_000), spent(month, 9_000, "free"))
    assert await ask(world) == 200
    await put(world, spent(month, 6_000, model="another"))

    refused = await world.ask(PROMPT, x_api_key="k")
    message = await world.ask({**PROMPT, "messages": []}, path="/v1/messages", x_api_key="k")

    assert (refused.status, refused.error["type"], refused.error["code"]) == (
        429, "insufficient_quota", "insufficient_quota"
    )  # fmt: skip
    assert f"of {BUDGET:,} tokens in {month}" in refused.error["message"]
    assert "-01 at 00:00 UTC" in refused.error["message"]
    assert refused.headers["x-should-retry"] == "false"
    assert "retry-after" not in refused.headers
    assert (message.status, message.error["type"]) == (429, "rate_limit_error")
    assert await ask(world, "free") == 200
    assert len(w1.started) == 2


@in_world(keys=BUDGETED)
async def test_what_this_router_served_counts_before_it_is_stored_and_once_after(world: World):
    await world.worker("w1", script=using(BUDGET // 2))
    assert await ask(world) == 200
    await LedgerStore(MemoryBus(world.hub), lambda _name, _entry: None).listen()
    await asyncio.sleep(2 * REPORT_S)

    assert await ask(world) == 200  # half of it was spent
    assert await ask(world) == 429
    await asyncio.sleep(2 * REPORT_S)
    assert await ask(world) == 429


@in_world(keys=BUDGETED)
async def test_another_router_counts_what_is_in_the_ledger(world: World):
    """So does this one after a restart: it begins with what it reads."""

    await LedgerStore(MemoryBus(world.hub), lambda _name, _entry: None).listen()
    await world.worker("w1", script=using(BUDGET))
    assert await ask(world) == 200
    await asyncio.sleep(2 * REPORT_S)

    other = Budgets(MemoryBus(world.hub), LoopClock(), UnstoredUsage(), lambda: None)
    (client,) = [one for one in world.router.authenticator._clients.values() if one.key.name == "ci"]
    other.keys_changed([client.key])
    assert other.refusal(client) is None
    following = asyncio.ensure_future(other.follow())
    await asyncio.sleep(0.1)
    assert other.refusal(client).status == 429
    following.cancel()


@in_world(keys=BUDGETED)
async def test_running_requests_count_as_they_are_charged(world: World):
    await world.worker("w1", script=held)
    body = msgspec.json.encode({**PROMPT, "n": 50, "max_tokens": 500})
    connection, answering = world.begin(body, x_api_key="k")
    await asyncio.sleep(0.1)

    assert await ask(world) == 429
    connection.leave()
    await answering
    assert await ask(world, stream=True, max_tokens=1) != 429


class WithoutLedger(MemoryBus):
    async def key_value_store(self, channel):
        raise BusDown(f"{channel.subject}: no such bucket")


@in_world(keys=BUDGETED)
async def test_a_router_that_cannot_read_the_ledger_serves_and_says_so(world: World):
    (client,) = [one for one in world.router.authenticator._clients.values() if one.key.name == "ci"]
    budgets = Budgets(WithoutLedger(world.hub), LoopClock(), UnstoredUsage(), lambda: None)
    following = asyncio.ensure_future(budgets.follow())
    await asyncio.sleep(2 * UNREAD_S_MAX)
    assert budgets.failure == ""  # No key has a budget.
    budgets.keys_changed([client.key])
    assert budgets.failure == ""
    await asyncio.sleep(UNREAD_S_MAX)

    assert "the usage ledger cannot be read" in budgets.failure
    assert budgets.refusal(client) is None
    following.cancel()


@in_world(keys=BUDGETED)
async def test_a_router_whose_usage_is_not_stored_serves_and_says_so(world: World):
    await world.worker("w1")
    status = ServiceStatus(service="router", instance="r", phase=ServicePhase.READY)
    assert await ask(world, "free") == 200
    await asyncio.sleep(UNSTORED_S_MAX + 2 * REPORT_S)
    assert world.router.add_status_fields(status).warning == ""  # No budget needs it.
    assert await ask(world) == 200

    assert "no metrics collector stores usage" in world.router.add_status_fields(status).warning
    await LedgerStore(MemoryBus(world.hub), lambda _name, _entry: None).listen()
    await asyncio.sleep(2 * REPORT_S)
    assert world.router.add_status_fields(status).warning == ""


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        ("monthly_tokens = -1", "monthly_tokens must be a positive number"),
        ('name = "a b"', "name must be"),
        ('name = "ci"', "another key has the name 'ci'"),
    ],
)
def test_wrong_budgets_and_names_are_refused(more, wrong):
    text = BUDGETED + f'[[key]]\ntenant = "t"\nsha256 = "{digest_of(b"x")}"\n{more}\n'
    with pytest.raises(SettingsError, match=wrong):
        keyring_of(Settings(keys=text))


@in_world(keys=BUDGETED)
async def test_an_entry_that_is_deleted_counts_no_more(world: World):
    await world.worker("w1")
    month = month_of(world)
    await put(world, spent(month, BUDGET))
    assert await ask(world) == 429
    store = await MemoryBus(world.hub).key_value_store(USAGE)
    await store.delete(spent(month, BUDGET).entry)
    await asyncio.sleep(0.1)
    assert await ask(world) == 200
