"""During a NATS outage new requests wait; after it, streams resume once their workers are heard again."""

from __future__ import annotations

import asyncio

import pytest

from services.router.relay.failure_policy import FailurePolicy
from shared.contracts.failures import Reason
from shared.contracts.workers import Role
from tests.unit.router.fake_worker import WHOLE_RESPONSE, serve_leg
from tests.unit.router.relay.test_migration import error_of
from tests.unit.router.streams import ANSWER, TOKENS, fails, falls_silent, streams
from tests.unit.router.world import World, in_world, parse, prompt, settle

BODY = b'{"model":"m","prompt":"x"}'
STREAM = b'{"model":"m","prompt":"x","stream":true}'


def lose(world: World) -> None:
    """Break every connection to NATS."""
    for bus in (world.bus, *(worker.bus for worker in world.workers.values())):
        bus.lose()


def restore(world: World) -> None:
    for bus in (world.bus, *(worker.bus for worker in world.workers.values())):
        bus.restore()


@in_world(failures=FailurePolicy(bus_wait_s_max=5.0))
async def test_new_requests_wait_for_nats(world: World):
    await world.worker("w1")
    world.bus.lose()
    connection, answering = world.begin(BODY)
    await asyncio.sleep(3)
    assert not answering.done()

    world.bus.restore()
    await answering

    assert parse(connection.written).body == WHOLE_RESPONSE


@in_world(failures=FailurePolicy(bus_wait_s_max=5.0))
async def test_the_wait_for_nats_is_bounded_and_gives_retry_after(world: World):
    await world.worker("w1")
    world.bus.lose()
    begun = asyncio.get_running_loop().time()

    response = await world.ask(prompt())

    assert (response.status, response.error["code"]) == (503, "bus_down")
    assert "retry-after" in response.headers
    assert asyncio.get_running_loop().time() - begun == pytest.approx(5.0, abs=0.1)


@in_world()
async def test_a_client_disconnect_during_the_outage_ends_its_request(world: World):
    w1 = await world.worker("w1")
    world.bus.lose()
    connection, answering = world.begin(BODY)
    await settle()

    connection.leave()
    await asyncio.wait_for(answering, 0.1)
    world.bus.restore()
    await asyncio.sleep(1)

    assert (w1.started, connection.written, len(world.router.relay.in_flight)) == ([], b"", 0)


@in_world()
async def test_running_requests_are_placed_again_after_the_outage(world: World):
    worker = await world.worker("w1", script=lambda *_leg: None)
    connection, answering = world.begin(BODY)
    await settle()

    world.bus.lose()
    worker.script = serve_leg
    await asyncio.sleep(2)
    world.bus.restore()
    await answering

    assert parse(connection.written).body == WHOLE_RESPONSE
    assert len(worker.started) == 2


@in_world()
async def test_streams_resume_after_a_long_nats_outage(world: World):
    worker = await world.worker("w1", script=streams(3, falls_silent))
    connection, answering = world.begin(STREAM)
    await settle()

    world.bus.lose()
    worker.script = streams()
    await asyncio.sleep(20)
    world.bus.restore()
    await answering

    assert parse(connection.written).body == ANSWER


@in_world()
async def test_streams_that_wait_too_long_end_with_bus_down(world: World):
    await world.worker("w1", script=streams(3, falls_silent))
    connection, answering = world.begin(STREAM)
    await settle()

    world.bus.lose()
    await answering

    assert error_of(parse(connection.written).body)["code"] == "bus_down"


@in_world()
async def test_only_workers_that_reported_since_the_outage_get_legs(world: World):
    gone, there = await world.worker("w1"), await world.worker("w2")
    lose(world)
    await gone.vanish()
    await asyncio.sleep(0.5)
    restore(world)

    responses = [await world.ask(prompt(), x_baton_mode="aggregated") for _ in range(6)]

    assert {response.status for response in responses} == {200}
    assert {response.headers["x-baton-decode-worker"] for response in responses} == {"w2"}
    assert (gone.started, len(there.started)) == ([], 6)


@in_world()
async def test_a_worker_that_stays_silent_delays_requests_only_briefly(world: World):
    gone = await world.worker("w1")
    await world.worker("w2")
    lose(world)
    await gone.vanish()
    restore(world)
    begun = asyncio.get_running_loop().time()

    response = await world.ask(prompt())

    assert response.status == 200
    assert asyncio.get_running_loop().time() - begun < 2.5


@in_world()
async def test_many_streams_all_resume(world: World):
    p1, d1 = await world.pair(decode=streams(2, falls_silent))
    running = [world.begin(STREAM) for _ in range(20)]
    await settle()

    lose(world)
    d1.script = streams()
    await asyncio.sleep(4)
    restore(world)
    await asyncio.gather(*(answering for _, answering in running))

    assert {parse(connection.written).body for connection, _ in running} == {ANSWER}
    assert len(d1.started) == 40
    assert p1.started


@in_world()
async def test_a_worker_that_dies_during_the_outage_is_replaced(world: World):
    first = await world.worker("w1", script=streams(2, falls_silent))
    connection, answering = world.begin(STREAM)
    await settle()
    lose(world)
    await first.vanish()
    await asyncio.sleep(1)
    restore(world)

    second = await world.worker("w2", Role.BOTH, streams())
    await answering

    assert parse(connection.written).body == ANSWER
    assert len(second.started) == 1


@in_world()
async def test_leg_failures_during_the_outage_count_as_bus_failures(world: World):
    worker = await world.worker("w1", script=streams(len(TOKENS) - 1, fails(Reason.ENGINE_DEAD)))
    connection, answering = world.begin(STREAM)
    while not worker.started:
        await asyncio.sleep(0)
    world.bus.lose()
    worker.script = streams()
    await asyncio.sleep(1)
    world.bus.restore()
    await worker.vanish()
    await world.worker("w2", script=streams())
    await answering

    assert parse(connection.written).body == ANSWER
