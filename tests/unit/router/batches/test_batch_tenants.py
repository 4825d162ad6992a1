"""One tenant's batches, whatever they wait for and however many they are, leave others' theirs."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from services.router.batches.batch_run import STUCK_S
from services.router.batches.batches import RUNS_AT_ONCE_MAX, UNFINISHED_MAX
from services.router.batches.store import Records
from shared.bus.frame_sender import LegFrames
from shared.contracts.api_keys import digest_of
from shared.contracts.failures import Failure, Reason
from shared.contracts.inference import StartLeg
from tests.support.virtual_time import LoopClock, as_test
from tests.unit.router.batches.batch_world import COMPLETIONS, ENDED, KEY, Client, Engine, jsonl, line, run_with_engine
from tests.unit.router.fake_worker import FakeWorker
from tests.unit.router.world import World

AT_ONCE = 4
SOON_S = 15.0
"""A batch of 20 lines takes less, alone or beside others; an hour's wait for a minute's limit takes more."""


def keys_of(**limits: str) -> str:
    """A key for each tenant, of the tenant's name."""
    entries = (KEY.format(tenant, digest_of(tenant)) + limit + "\n" for tenant, limit in limits.items())
    return f'salt = "{"s" * 32}"\n' + "".join(entries)


def with_tenants(*, at_once: int = AT_ONCE, **limits: str):
    """The test gets a world and its engine."""
    settings = {"keys": keys_of(**limits), "batch_lines_at_once": at_once}

    def run(test: Callable[..., Awaitable[None]], **kw: Any) -> None:
        run_with_engine(lambda world, engine, _client: test(world, engine, **kw), **settings)

    return lambda test: as_test(test, functools.partial(run, test), given=2)


def many(count: int = 20, text: str = "", model: str = "m") -> bytes:
    lines = (line(n, body={"model": model, "prompt": text or f"p{n}"}) for n in range(count))
    return jsonl(*lines)


async def made_by(client: Client, count: int, content: bytes) -> list[str]:
    """So many batches of this content."""
    file = await client.upload(content)
    body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
    made = [await client.call("POST", "/batches", json=body) for _ in range(count)]
    return [one.json()["id"] for one in made if one.status_code == 200]


async def holds_none(world: World, tenant: str) -> bool:
    """Whether the tenant's lines hold no slot, but for moments in which one is served."""
    slots, held = world.router.batches.lines.slots, set()
    for _ in range(20):
        held.add(slots.held_by(tenant))
        await asyncio.sleep(0.11)
    return 0 in held


async def is_served_soon(client: Client) -> None:
    """A batch of 20 lines is."""
    begun = LoopClock().now()
    (batch_id,) = await made_by(client, 1, many())
    batch = await client.until(batch_id, *ENDED)
    assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert LoopClock().now() - begun < SOON_S


LIMITS = {"requests": "requests_per_minute = 20", "budget": "monthly_tokens = 10", "tokens": "tokens_per_minute = 10"}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("batches", [1, 4])
@with_tenants(**LIMITS, other="")
async def test_lines_that_wait_for_a_limit_of_their_key_hold_no_slots(
    world: World, engine: Engine, limit: str, batches: int
):
    attacker, other = Client(world.router, limit), Client(world.router, "other")
    made = await made_by(attacker, batches, many(40))
    await asyncio.sleep(60)
    assert await holds_none(world, limit)
    await is_served_soon(other)
    assert len(made) == batches
    assert {run.id for run in world.router.batches.runner.runs} == set(made)
    answered = len(engine.prompts)
    await asyncio.sleep(300)
    assert (len(engine.prompts) > answered) == (limit != "budget")  # Others are served as they may.


@pytest.mark.slow
@with_tenants(attacker="requests_per_minute = 30", other="")
async def test_a_key_at_its_limit_gets_all_that_the_limit_allows(world: World, engine: Engine):
    attacker = Client(world.router, "attacker")
    await made_by(attacker, 1, many(400))
    await asyncio.sleep(60)
    before = len(engine.prompts)
    await asyncio.sleep(600)
    assert 290 <= len(engine.prompts) - before <= 300


@pytest.mark.parametrize("is_before", [True, False])
@with_tenants(attacker="", other="")
async def test_a_tenant_with_many_batches_leaves_runs_to_others(world: World, engine: Engine, is_before: bool):
    """Whether it made them before the router looked, or one after the other."""
    engine.stays = lambda text: text == "long"
    runner = world.router.batches.runner
    runner._is_stopped = is_before
    attacker, other = (Client(world.router, tenant) for tenant in ("attacker", "other"))
    await made_by(attacker, 30, many(40, "long"))
    if is_before:
        begun = asyncio.ensure_future(is_served_soon(other))
        await asyncio.sleep(1)
        runner._is_stopped = False
        await begun
    else:
        await asyncio.sleep(60)
        await is_served_soon(other)


@with_tenants(attacker="", other="")
async def test_many_small_batches_of_one_tenant_are_no_more_than_one_large_one(world: World, engine: Engine):
    attacker, other = (Client(world.router, tenant) for tenant in ("attacker", "other"))
    small = await made_by(attacker, 90, many(1))
    await is_served_soon(other)
    for one in small:
        assert (await attacker.until(one, *ENDED))["request_counts"]["completed"] == 1


@with_tenants(attacker="", other="")
async def test_lines_that_fail_and_are_tried_again_hold_no_slots_meanwhile(world: World, engine: Engine):
    failing = 0

    def script(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        nonlocal failing
        if b"fails" not in start.body:
            engine(worker, start, frames)
            return
        failing += 1
        frames.fail(Failure(reason=Reason.INTERNAL, message="it fails"))

    world.workers["w1"].script = script
    attacker, other = (Client(world.router, tenant) for tenant in ("attacker", "other"))
    await made_by(attacker, 4, many(200, "fails"))
    await asyncio.sleep(10)
    assert await holds_none(world, "attacker")
    await is_served_soon(other)
    assert failing


@with_tenants(at_once=32, attacker="", other="")
async def test_lines_for_a_model_whose_workers_are_gone_or_full_stop_no_others(world: World, engine: Engine):
    sleepy = Engine()
    sleepy.stays = lambda _text: True
    full = await world.worker("w2", script=sleepy, models=("full",))
    gone = await world.worker("w3", script=Engine(), models=("gone",))
    await gone.vanish()
    attacker, other = (Client(world.router, tenant) for tenant in ("attacker", "other"))
    await made_by(attacker, 2, many(200, "long", "full"))
    await made_by(attacker, 2, many(200, "long", "gone"))
    await asyncio.sleep(60)
    assert full.started
    assert world.router.queue.lines_waiting
    await is_served_soon(other)


GONE = [f"gone{n}" for n in range(RUNS_AT_ONCE_MAX + 2)]


@pytest.mark.slow
@with_tenants(**dict.fromkeys(GONE, ""), other="")
async def test_batches_that_only_wait_take_turns_with_those_of_tenants_without_a_run(world: World, engine: Engine):
    gone = await world.worker("w2", script=Engine(), models=("gone",))
    await gone.vanish()
    made = {tenant: (await made_by(Client(world.router, tenant), 1, many(1, model="gone")))[0] for tenant in GONE}
    await asyncio.sleep(STUCK_S)
    begun = LoopClock().now()
    other = Client(world.router, "other")
    (batch_id,) = await made_by(other, 1, many())
    assert (await other.until(batch_id, *ENDED))["request_counts"]["completed"] == 20
    assert LoopClock().now() - begun < 2 * STUCK_S

    await asyncio.sleep(2 * STUCK_S)
    records = [stored for tenant in GONE for stored in await Records(world.bus).batches(tenant)]
    assert [one.runs for one in records] == [bool(one.run) for one in records]  # To give way is no interruption.
    await world.worker("w3", script=engine, models=("gone",))
    for tenant, one in made.items():
        batch = await Client(world.router, tenant).until(one, *ENDED)
        assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 1)


@with_tenants(attacker="", other="")
async def test_a_tenant_cannot_queue_more_batches_by_asking_for_them_at_once(world: World, engine: Engine):
    engine.stays = lambda _text: True
    attacker, other = (Client(world.router, tenant) for tenant in ("attacker", "other"))
    file = await attacker.upload(many(1))
    body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
    asked = [attacker.call("POST", "/batches", json=body) for _ in range(3 * UNFINISHED_MAX)]
    statuses = [one.status_code for one in await asyncio.gather(*asked)]
    assert (statuses.count(200), statuses.count(429)) == (UNFINISHED_MAX, 2 * UNFINISHED_MAX)
    refused = await attacker.call("POST", "/batches", json=body)
    assert (refused.json()["error"]["code"], "retry-after" in refused.headers) == ("too_many_batches", True)
    engine.stays = lambda _text: False
    await is_served_soon(other)
