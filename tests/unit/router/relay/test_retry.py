"""A retry carries nothing over from the failed attempt, and needs no orchestrator."""

from __future__ import annotations

import asyncio

from services.router.relay.failure_policy import FailurePolicy
from services.router.request.fields import MODEL_CHARS_MAX
from shared.bus.frame_sender import LegFrames
from shared.contracts.channels import WORKER_RECORDS
from shared.contracts.failures import Failure, Reason
from shared.contracts.inference import LegKind, LegReport, StartLeg
from shared.contracts.workers import Role
from tests.unit.router.fake_worker import EVENTS, JSON, SSE, WHOLE_RESPONSE, FakeWorker, serve_leg
from tests.unit.router.world import World, give_legs, in_world, prompt, settle


def lost(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
    frames.fail(Failure(reason=Reason.WORKER_LOST, message="as the test wants"))


def drains(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
    frames.fail(Failure(reason=Reason.WORKER_DRAINING, message="it takes no new legs"))


def alone_or_with_others(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
    """Report 4 cached tokens for the first leg and 8 for the second."""
    if start.kind is LegKind.PREFILL:
        serve_leg(worker, start, frames)
        return
    frames.head(200, JSON)
    frames.data(WHOLE_RESPONSE)
    frames.end(LegReport(prompt_tokens=9, cached_tokens=8, completion_tokens=3))


@in_world()
async def test_a_retry_carries_no_numbers_of_the_failed_attempt(world: World):
    reports = await world.reports()
    await world.worker("p1", Role.PREFILL, alone_or_with_others)
    await world.worker("d1", Role.DECODE, lost)

    response = await world.ask(prompt(), x_baton_mode="auto")
    await asyncio.sleep(1)

    assert response.status == 200
    (finished,) = reports
    assert (finished.attempts, finished.mode, finished.prefill_worker) == (2, "aggregated", "")
    assert (finished.cached_tokens, finished.prefill_s) == (8, -1.0)


@in_world(failures=FailurePolicy(attempts_max=1))
async def test_workers_that_drain_count_against_no_limit_of_attempts(world: World):
    draining = [await world.worker(f"w{number}", script=drains) for number in range(4)]
    await world.worker("there")
    give_legs(world, "there", 5)

    response = await world.ask(prompt())

    assert (response.status, response.headers["x-baton-decode-worker"]) == (200, "there")
    assert [len(worker.started) for worker in draining] == [1] * 4


@in_world(first_frame_s_max=1.0)
async def test_late_frames_of_an_abandoned_leg_are_ignored(world: World):
    withheld: list[LegFrames] = []

    def first_one_is_late(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        if withheld:
            serve_leg(worker, start, frames)
            for late in withheld:
                late.head(200, SSE)
                late.data(b"data: from the dead\n\n")
        else:
            withheld.append(frames)

    await world.worker("w1", Role.BOTH, first_one_is_late)
    await world.worker("w2", Role.BOTH, first_one_is_late)

    response = await world.ask(prompt(stream=True), x_baton_mode="aggregated")

    assert response.status == 200
    assert b"from the dead" not in response.body
    assert response.body.startswith(EVENTS[0])


@in_world()
async def test_without_orchestrator_requests_of_an_expired_worker_are_retried(world: World):
    def silent(worker: FakeWorker, _start: StartLeg, _frames: LegFrames) -> None:
        worker.alive = False

    w1 = await world.worker("w1", Role.BOTH, silent)
    _connection, answering = world.begin(b'{"model":"m","prompt":"hello"}')
    await settle()
    await world.worker("w2")
    await (await world.bus.key_value_store(WORKER_RECORDS)).delete(w1.worker_id)

    async with asyncio.timeout(10):
        await answering

    assert len(world.workers["w2"].started) == 1


@in_world()
async def test_a_prompt_counts_as_waiting_until_its_first_token(world: World):
    def slow_stream(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(200, SSE)

    w1 = await world.worker("w1", Role.BOTH, slow_stream)
    view = world.router.fleet.cluster.workers[w1.worker_id]
    _connection, answering = world.begin(b'{"model":"m","prompt":"%b","stream":true}' % (b"word " * 400))
    await settle()
    before = view.own.tokens

    (frames,) = w1.frames.values()
    frames.data(EVENTS[0])
    await settle()
    during, legs = view.own.tokens, view.own.legs
    frames.end(LegReport())
    await answering

    assert (before > 100, during, legs) == (True, 0, 1)
    assert (view.own.tokens, view.own.legs) == (0, 0)


@in_world()
async def test_an_overlong_model_name_is_truncated_in_every_report(world: World):
    reports = await world.reports()
    await world.worker("w1")

    responses = [await world.ask(prompt(model="x" * (20 << 20))) for _ in range(4)]
    await asyncio.sleep(1)

    assert {response.status for response in responses} == {404}
    assert max(len(response.body) for response in responses) < 2000
    assert [len(one.model) for one in reports] == [MODEL_CHARS_MAX] * 4
