"""During a NATS outage new requests wait; after it, streams resume once their workers are heard again."""

from __future__ import annotations

import asyncio

import pytest

from services.router.relay.failure_policy import FailurePolicy
from shared.contracts.channels import WORKER_RECORDS, bucket_of
from shared.contracts.failures import Reason
from shared.contracts.workers import Role
from tests.unit.router.fake_worker import WHOLE_RESPONSE, Script, serve_leg
from tests.unit.router.relay.test_migration import error_of
from tests.unit.router.streams import ANSWER, TOKENS, fails, falls_silent, streams
from tests.unit.router.world import World, give_legs, in_world, parse, prompt, settle

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


NEVER_ANSWERS: Script = lambda *_leg: None  # noqa: E731


@in_world(failures=FailurePolicy(bus_wait_s_max=4.0))
async def test_while_nats_is_frozen_every_request_is_told_so_in_time(world: World):
    """Before the freeze, at its beginning, unnoticed, and noticed."""
    await world.worker("w1", script=NEVER_ANSWERS)
    now = asyncio.get_running_loop().time
    asked = [world.begin(BODY)]
    await asyncio.sleep(1.0)
    world.hub.freeze()
    frozen_at, ended_at = now(), {}
    for _ in range(8):
        asked.append(world.begin(BODY))
        began_at = now()
        asked[-1][1].add_done_callback(lambda _, at=began_at: ended_at.update({at: now()}))
        await asyncio.sleep(1.0)
    await asyncio.gather(*(answering for _, answering in asked))

    responses = [parse(connection.written) for connection, _ in asked]
    assert {(response.status, response.error["code"]) for response in responses} == {(503, "bus_down")}
    assert max(ended - began for began, ended in ended_at.items()) <= 4.2
    assert max(ended_at.values()) <= frozen_at + 7.0 + 4.2


@in_world(failures=FailurePolicy(bus_wait_s_max=6.0))
async def test_a_freeze_within_the_wait_costs_no_request(world: World):
    """It is longer than workers may be silent, and the connections live on."""
    await world.pair()
    world.hub.freeze()
    asked = []
    for _ in range(10):
        asked.append(world.begin(BODY))
        await asyncio.sleep(0.5)
    world.hub.thaw()
    asked.append(world.begin(BODY))
    await asyncio.gather(*(answering for _, answering in asked))

    assert {parse(connection.written).status for connection, _ in asked} == {200}


@in_world()
async def test_outages_count_against_no_limit_of_attempts(world: World):
    worker = await world.worker("w1", script=NEVER_ANSWERS)
    connection, answering = world.begin(BODY)
    for _ in range(5):
        await asyncio.sleep(1.0)
        lose(world)
        await asyncio.sleep(0.1)
        restore(world)
    await asyncio.sleep(1.0)
    lose(world)
    worker.script = serve_leg
    restore(world)
    await answering

    assert parse(connection.written).body == WHOLE_RESPONSE
    assert len(worker.started) == 7


@in_world()
async def test_outages_count_against_no_limit_of_resumes_but_the_clients_none(world: World):
    worker = await world.worker("w1", script=streams(1, falls_silent))
    resumed, answering = world.begin(STREAM)
    never, ending = world.begin(b'{"model":"m","prompt":"x","stream":true,"baton":{"resumes_max":0}}')
    for _ in range(4):
        await asyncio.sleep(1.0)
        lose(world)
        restore(world)
    await asyncio.sleep(1.0)
    lose(world)
    worker.script = streams()
    restore(world)
    await asyncio.gather(answering, ending)

    assert parse(resumed.written).body == ANSWER
    assert error_of(parse(never.written).body)["code"] == "bus_down"


@in_world(failures=FailurePolicy(attempts_max=1))
async def test_workers_that_nats_cannot_reach_count_against_no_limit_and_get_no_more_legs(world: World):
    gone = [await world.worker(f"gone{number}") for number in range(4)]
    there = await world.worker("there")
    give_legs(world, "there", 5)
    for worker in gone:
        await worker.vanish()

    first, second = await world.ask(prompt()), await world.ask(prompt())

    assert {first.headers["x-baton-decode-worker"], second.headers["x-baton-decode-worker"]} == {"there"}
    assert len(there.started) == 2
    views = world.router.fleet.cluster.workers
    assert not any(views[worker.worker_id].ready for worker in gone)


@in_world()
async def test_a_worker_that_reports_but_takes_no_legs_ends_a_request(world: World):
    worker = await world.worker("w1")
    for subscription in worker._subscriptions:
        await subscription.close()

    response = await world.ask(prompt())

    assert (response.status, response.error["code"]) == (502, "worker_lost")


@in_world(failures=FailurePolicy(bus_wait_s_max=5.0), queue_s_max=60.0)
async def test_a_request_that_was_queued_for_longer_still_waits_for_nats(world: World):
    worker = await world.worker("w1", script=NEVER_ANSWERS)
    running = [world.begin(BODY) for _ in range(80)]
    await asyncio.sleep(10.0)
    queued = len(world.router.queue)
    assert queued > 0

    lose(world)
    worker.script = serve_leg
    await asyncio.sleep(1.0)
    restore(world)
    await asyncio.gather(*(answering for _, answering in running))

    assert {parse(connection.written).status for connection, _ in running} == {200}


@in_world()
async def test_workers_that_an_emptied_registry_lacks_are_not_dropped_before_they_can_report(world: World):
    worker = await world.worker("w1")
    lose(world)
    await asyncio.sleep(4.0)
    connection, answering = world.begin(BODY)
    world.hub.buckets[bucket_of(WORKER_RECORDS)].values.clear()
    worker.unfrozen.clear()
    restore(world)
    await asyncio.sleep(2.5)
    assert not answering.done()

    worker.unfrozen.set()
    await answering

    assert parse(connection.written).status == 200


@in_world(failures=FailurePolicy(bus_wait_s_max=8.0))
async def test_workers_that_are_not_back_yet_are_waited_for_and_named_as_the_cause(world: World):
    worker = await world.worker("w1")
    worker.unfrozen.clear()
    lose(world)
    restore(world)
    begun = asyncio.get_running_loop().time()

    response = await world.ask(prompt())

    assert (response.status, response.error["code"]) == (503, "bus_down")
    assert asyncio.get_running_loop().time() - begun == pytest.approx(8.0, abs=0.3)


@in_world()
async def test_a_router_that_starts_with_an_empty_registry_calls_no_model_unknown(world: World):
    await asyncio.sleep(10.0)

    response = await world.ask(prompt())

    assert (response.status, response.error["code"]) == (503, "no_worker")


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
