"""Budgets of keys: what counts, what a client is told, and what happens without the ledger."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import msgspec
import pytest

from services.collector.usage_ledger import LedgerStore
from services.router.settings import Settings, keyring_of
from services.router.usage import REPORT_S, UNREAD_S_MAX, UNSTORED_S_MAX, Budgets, UnstoredUsage
from shared.bus.port import BusDown
from shared.contracts.api_keys import digest_of
from shared.contracts.channels import USAGE
from shared.contracts.control import ServicePhase, ServiceStatus
from shared.contracts.inference import LegReport
from shared.contracts.usage import UsageCounts, UsageMonth, entry_id
from shared.runtime.settings import SettingsError
from tests.support.memory_bus import MemoryBus
from tests.support.virtual_time import LoopClock
from tests.unit.router.relay.test_charging import held
from tests.unit.router.world import World, in_world

BUDGET = 10_000
KEY = '[[key]]\ntenant = "acme"\nname = "{}"\nsha256 = "{}"\n{}\n'
KEYS = f'salt = "{"s" * 32}"\n' + "".join([
    KEY.format("ci", digest_of(b"k"), f"monthly_tokens = {BUDGET}"),
    KEY.format("free", digest_of(b"free"), ""),
])  # fmt: skip
PROMPT = {"model": "m", "prompt": [1, 2, 3, 4], "max_tokens": 3}


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


@in_world(keys=KEYS)
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


@in_world(keys=KEYS)
async def test_what_this_router_served_counts_before_it_is_stored_and_once_after(world: World):
    await world.worker("w1", script=using(BUDGET // 2))
    assert await ask(world) == 200
    await LedgerStore(MemoryBus(world.hub), lambda _name, _entry: None).listen()
    await asyncio.sleep(2 * REPORT_S)

    assert await ask(world) == 200  # half of it was spent
    assert await ask(world) == 429
    await asyncio.sleep(2 * REPORT_S)
    assert await ask(world) == 429


@in_world(keys=KEYS)
async def test_another_router_counts_what_is_in_the_ledger(world: World):
    """So does this one after a restart: it begins with what it reads."""

    await LedgerStore(MemoryBus(world.hub), lambda _name, _entry: None).listen()
    await world.worker("w1", script=using(BUDGET))
    assert await ask(world) == 200
    await asyncio.sleep(2 * REPORT_S)

    other = Budgets(MemoryBus(world.hub), LoopClock(), UnstoredUsage())
    (client,) = [one for one in world.router.authenticator._clients.values() if one.key.name == "ci"]
    other.keys_changed([client.key])
    assert other.refusal(client) is None
    following = asyncio.ensure_future(other.follow())
    await asyncio.sleep(0.1)
    assert other.refusal(client).status == 429
    following.cancel()


@in_world(keys=KEYS)
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


@in_world(keys=KEYS)
async def test_a_router_that_cannot_read_the_ledger_serves_and_says_so(world: World):
    (client,) = [one for one in world.router.authenticator._clients.values() if one.key.name == "ci"]
    budgets = Budgets(WithoutLedger(world.hub), LoopClock(), UnstoredUsage())
    following = asyncio.ensure_future(budgets.follow())
    await asyncio.sleep(2 * UNREAD_S_MAX)
    assert budgets.failure == ""  # No key has a budget.
    budgets.keys_changed([client.key])
    assert budgets.failure == ""
    await asyncio.sleep(UNREAD_S_MAX)

    assert "the usage ledger cannot be read" in budgets.failure
    assert budgets.refusal(client) is None
    following.cancel()


@in_world(keys=KEYS)
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
    text = KEYS + f'[[key]]\ntenant = "t"\nsha256 = "{digest_of(b"x")}"\n{more}\n'
    with pytest.raises(SettingsError, match=wrong):
        keyring_of(Settings(keys=text))


@in_world(keys=KEYS)
async def test_an_entry_that_is_deleted_counts_no_more(world: World):
    await world.worker("w1")
    month = month_of(world)
    await put(world, spent(month, BUDGET))
    assert await ask(world) == 429
    store = await MemoryBus(world.hub).key_value_store(USAGE)
    await store.delete(spent(month, BUDGET).entry)
    await asyncio.sleep(0.1)
    assert await ask(world) == 200
