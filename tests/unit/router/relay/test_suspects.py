"""A request that kills an engine gets no second one; requests beside it continue. See DECISIONS 40."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.relay.failure_policy import FailurePolicy
from services.router.state.quarantine import QUARANTINE_S_MAX, QUARANTINED_MAX, Quarantine, digest_of
from shared.bus.frame_sender import LegFrames
from shared.contracts.channels import WORKER_LOST
from shared.contracts.failures import Failure, Reason
from shared.contracts.inference import StartLeg
from shared.contracts.workers import Role, WorkerLost
from tests.support.virtual_time import in_virtual_time
from tests.unit.router.fake_worker import FakeWorker, serve_leg
from tests.unit.router.replicas import replicas
from tests.unit.router.streams import ANSWER, streams
from tests.unit.router.world import CHAT, COMPLETIONS, World, in_world, parse, prompt, run_in_world, settle

POISON = b"poison"
ENGINES = 4
SILENT_S = 3.0
"""After so much silence, the orchestrator declares a worker lost."""


def dies(*, suspect: bool):
    def how(frames: LegFrames) -> None:
        frames.fail(Failure(reason=Reason.ENGINE_DEAD, message="out of memory", suspect=suspect))

    return how


def killed_by_poison(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
    """An engine that dies of one prompt before it has generated a token."""
    if POISON in start.body:
        dies(suspect=True)(frames)
    else:
        serve_leg(worker, start, frames)


async def engines(world: World, script: Any) -> list[FakeWorker]:
    return [await world.worker(f"w{number}", script=script) for number in range(ENGINES)]


def asked(workers: list[FakeWorker]) -> int:
    return sum(len(worker.started) for worker in workers)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["aggregated", "auto"])
@in_world()
async def test_a_request_that_kills_engines_kills_one_however_often_it_is_sent(world: World, stream, mode):
    workers = await engines(world, killed_by_poison)
    poison = prompt(prompt="poison", stream=stream)

    first = await world.ask(poison, x_baton_mode=mode)
    again = [await world.ask({**poison, "user": f"u{number}"}, x_baton_mode=mode) for number in range(5)]
    other = await world.ask(prompt(stream=stream), x_baton_mode=mode)

    assert (first.status, first.error["code"]) == (502, "engine_dead")
    assert "no other engine" in first.error["message"]
    assert [(one.status, one.error["code"]) for one in again] == [(422, "quarantined")] * 5
    assert other.status == 200
    assert asked(workers) - len([leg for worker in workers for leg in worker.started if POISON not in leg.body]) == 1


@in_world()
async def test_a_prefill_engine_that_dies_of_a_prompt_is_the_only_one(world: World):
    prefills = [await world.worker(f"p{number}", Role.PREFILL, killed_by_poison) for number in range(3)]
    decodes = [await world.worker(f"d{number}", Role.DECODE) for number in range(3)]

    response = await world.ask(prompt(prompt="poison"), x_baton_mode="disaggregated")

    assert (response.status, asked(prefills), asked(decodes)) == (502, 1, 0)


@in_world()
async def test_streams_that_had_tokens_when_their_engine_died_go_on(world: World):
    one = await world.worker("w1", script=streams(2, dies(suspect=False)))
    await world.worker("w2", script=streams())

    bodies = [(await world.ask(prompt(stream=True), x_baton_mode="aggregated")).body for _ in range(4)]

    assert bodies == [ANSWER] * 4
    assert one.started


@in_world(failures=FailurePolicy(resumes_max=8))
async def test_a_stream_that_kills_each_engine_after_some_tokens_kills_two(world: World):
    workers = await engines(world, streams(1, dies(suspect=False)))

    response = await world.ask(prompt(stream=True), x_baton_mode="aggregated")
    again = await world.ask(prompt(stream=True), x_baton_mode="aggregated")

    assert b'"engine_dead"' in response.body
    assert (asked(workers), again.status) == (2, 422)


@in_world()
async def test_a_request_whose_workers_vanish_one_after_the_other_gets_two(world: World):
    """Whether an engine or the network failed is not known of a lost worker: one loss proves nothing."""

    def silent(_worker: FakeWorker, _start: StartLeg, _frames: LegFrames) -> None:
        """Accepts the leg; then the worker is gone."""

    workers = await engines(world, silent)
    _connection, answering = world.begin(b'{"model":"m","prompt":"poison"}', x_baton_mode="aggregated")
    for count in (1, 2):
        await settle()
        assert asked(workers) == count
        (hit,) = [worker for worker in workers if worker.alive and worker.started]
        await hit.vanish()
        await asyncio.sleep(SILENT_S)
        lost = WorkerLost(worker_id=hit.worker_id, epoch=hit.epoch, silent_s=SILENT_S)
        await world.bus.publish(WORKER_LOST, lost)

    await answering

    assert asked(workers) == 2
    assert (await world.ask(b'{"model":"m","prompt":"poison"}')).status == 422


def slow(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> Any:
    """Answers after a second, unless its process is stopped meanwhile."""

    async def serve() -> None:
        await asyncio.sleep(1.0)
        await worker.unfrozen.wait()
        serve_leg(worker, start, frames)

    return serve()


async def freeze(world: World, worker: FakeWorker, at_s: float, back_s: float) -> None:
    """As SIGSTOP and SIGCONT do; what an orchestrator says of it meanwhile."""
    await asyncio.sleep(at_s)
    worker.unfrozen.clear()
    await asyncio.sleep(SILENT_S)
    await world.bus.publish(WORKER_LOST, WorkerLost(worker_id=worker.worker_id, epoch=worker.epoch, silent_s=SILENT_S))
    await asyncio.sleep(back_s - at_s - SILENT_S)
    worker.unfrozen.set()
    await worker.report()


@pytest.mark.parametrize("second_at_s", [1.0, 2.6, 3.6])
@in_world(requests_at_once_max=1000)
async def test_workers_that_freeze_within_seconds_blame_no_request(world: World, second_at_s):
    workers = await engines(world, slow)
    frozen = [
        asyncio.ensure_future(freeze(world, workers[0], 1.0, 13.0)),
        asyncio.ensure_future(freeze(world, workers[1], second_at_s, 13.0)),
    ]
    asked_for = []
    for number in range(100):
        asked_for.append(world.begin(b'{"model":"m","prompt":"%d"}' % (number % 40), x_baton_mode="aggregated"))
        await asyncio.sleep(0.15)
    await asyncio.gather(*frozen, *(answering for _, answering in asked_for))

    assert {parse(connection.written).status for connection, _ in asked_for} == {200}
    assert len(world.router.quarantine.entries) == 0


@in_world()
async def test_a_request_whose_two_workers_ended_is_blamed_until_one_of_them_reports(world: World):
    """They were cut off: NATS has lost their connections, and their processes run on."""
    workers = await engines(world, lambda *_: None)
    _connection, answering = world.begin(b'{"model":"m","prompt":"poison"}', x_baton_mode="aggregated")
    cut_off = []
    for _ in range(2):
        await settle()
        (hit,) = [worker for worker in workers if worker.alive and worker.started]
        await hit.vanish()
        cut_off.append(hit)
        await asyncio.sleep(SILENT_S)
        await world.bus.publish(WORKER_LOST, WorkerLost(worker_id=hit.worker_id, epoch=hit.epoch, silent_s=SILENT_S))
    await answering
    refused = await world.ask(b'{"model":"m","prompt":"poison"}')
    await cut_off[0].report()
    await settle()
    for worker in workers:
        worker.script = serve_leg
    served = await world.ask(b'{"model":"m","prompt":"poison"}')

    assert (refused.status, served.status) == (422, 200)


@in_world()
async def test_a_request_whose_workers_restart_one_after_the_other_gets_two(world: World):
    """A supervisor starts them again at once: nobody sees them silent."""
    workers = await engines(world, lambda *_: None)
    connection, answering = world.begin(b'{"model":"m","prompt":"poison"}', x_baton_mode="aggregated")
    lives = list(workers)
    for _ in range(2):
        await settle()
        (hit,) = [life for life in lives if life.alive and life.started]
        await hit.vanish()
        lives.append(await world.worker(hit.worker_id, script=hit.script, epoch=hit.epoch + 1))
    await answering

    assert parse(connection.written).status == 502
    assert asked(lives) == 2


@in_virtual_time
async def test_other_routers_forget_a_quarantine_when_its_worker_reports():
    async with replicas(routers=2, workers=1) as world:
        (worker,) = world.workers
        one, other = world.routers
        lives = [(worker.worker_id, worker.epoch)]
        one.reservations.quarantined(b"d" * 16, one.quarantine.add(b"d" * 16, 0.0, lives), lives)
        await asyncio.sleep(0.1)
        before = [len(router.quarantine.entries) for router in world.routers]
        await world.report()

        assert before == [1, 1]
        assert [len(router.quarantine.entries) for router in (one, other)] == [0, 0]


@in_world()
async def test_a_quarantine_ends_and_each_further_death_makes_it_longer(world: World):
    workers = await engines(world, killed_by_poison)
    statuses = []
    for wait_s in (0, 59, 2, 200, 45):
        await asyncio.sleep(wait_s)
        statuses.append((await world.ask(prompt(prompt="poison"))).status)

    assert statuses == [502, 422, 502, 422, 502]
    assert asked(workers) == 3


@in_world()
async def test_a_request_that_an_engine_serves_after_its_quarantine_is_cleared(world: World):
    workers = await engines(world, killed_by_poison)
    await world.ask(prompt(prompt="poison"))
    await asyncio.sleep(61)
    for worker in workers:
        worker.script = serve_leg

    assert (await world.ask(prompt(prompt="poison"))).status == 200
    assert len(world.router.quarantine.entries) == 0


@in_virtual_time
async def test_other_routers_refuse_it_too():
    async with replicas(routers=3, workers=ENGINES) as world:
        for worker in world.workers:
            worker.script = killed_by_poison
        world.ask(world.routers[0], prompt="poison")
        await asyncio.sleep(0.1)
        for router in world.routers:
            world.ask(router, prompt="poison")
        await world.answered()

        assert sum(world.legs()) == 1
        assert [len(router.quarantine.entries) for router in world.routers] == [1, 1, 1]


def test_the_operator_sees_it(caplog):
    async def scenario(world: World) -> None:
        await engines(world, killed_by_poison)
        response = await world.ask(prompt(prompt="poison"), x_request_id="mine")

        assert world.router.registry.get_sample_value("baton_router_quarantined_total") == 1
        record = await world.router.decisions.find(response.headers["x-baton-decision"])
        assert record.outcome == "engine_dead"

    run_in_world(scenario)
    (line,) = [one.message for one in caplog.records if "quarantined" in one.message]
    assert "request mine" in line
    assert "out of memory" in line


def test_the_digest_is_of_what_an_engine_computes():
    first = digest_of(CHAT, b'{"model":"m","messages":[],"user":"a","cache_salt":"x"}')

    assert first == digest_of(CHAT, b'{ "messages":[], "user":"b", "model":"m", "baton":{"priority":3}}')
    assert first != digest_of(CHAT, b'{"model":"m","messages":[{}]}')
    assert first != digest_of(COMPLETIONS, b'{"model":"m","messages":[]}')
    assert digest_of(CHAT, b"\xff[") == digest_of(CHAT, b"\xff[")


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 5000), st.floats(-10, 1e9)), max_size=40))
def test_no_request_is_refused_for_ever(events):
    quarantine, now = Quarantine(60.0), 0.0
    for number, after_s, for_s in events:
        now += after_s
        quarantine.add(bytes([number]), now)
        quarantine.heard(bytes([number]), for_s, now)

    assert all(quarantine.refused_s(bytes([number]), now) <= QUARANTINE_S_MAX + 1e-6 for number in range(6))
    assert not any(quarantine.refused_s(bytes([number]), now + QUARANTINE_S_MAX + 1.0) for number in range(6))


def test_the_table_is_bounded():
    quarantine = Quarantine(60.0)
    for number in range(3 * QUARANTINED_MAX):
        quarantine.add(number.to_bytes(4), 0.0)

    assert len(quarantine.entries) == QUARANTINED_MAX
