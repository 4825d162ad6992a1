"""A broken stream migrates: the client gets every token exactly once, or a clear error."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from services.router.relay.failure_policy import FailurePolicy
from shared.bus.frame_sender import LegFrames
from shared.contracts.failures import Failure, Reason
from shared.contracts.inference import LegKind, LegReport, StartLeg, pack_tokens
from shared.contracts.workers import Role
from tests.unit.router.fake_worker import DONE, JSON, SSE, FakeWorker
from tests.unit.router.streams import ANSWER, ROLE, TOKENS, event, fails, falls_silent, loses_a_frame, streams
from tests.unit.router.world import CHAT, World, give_legs, in_world, parse, prompt, settle

BREAKS = [Reason.WORKER_LOST, Reason.ENGINE_DEAD, Reason.WORKER_DRAINING, Reason.CANCELLED]


def error_of(body: bytes) -> dict[str, Any]:
    """The error event at the end of a stream."""
    last = body.removesuffix(b"\n\n").rpartition(b"\n\n")[2]
    return msgspec.json.decode(last.removeprefix(b"data: "))["error"]


async def both(world: World, first: Any, second: Any = None, **kw: Any) -> tuple[FakeWorker, FakeWorker]:
    """Two workers; the router tries the first one first."""
    one = await world.worker("w1", script=first, **kw)
    other = await world.worker("w2", script=second or streams(), **kw)
    give_legs(world, "w2", 5)
    return one, other


@pytest.mark.parametrize("relayed", range(len(TOKENS) + 1))
@in_world()
async def test_a_broken_stream_migrates_and_continues_after_the_delivered_tokens(world: World, relayed):
    _w1, w2 = await both(world, streams(relayed, fails(Reason.ENGINE_DEAD)))

    response = await world.ask(prompt(stream=True))

    assert (response.status, response.body) == (200, ANSWER)
    assert [leg.resume for leg in w2.started] == [pack_tokens(TOKENS[:relayed])]


@pytest.mark.parametrize("reason", BREAKS)
@in_world()
async def test_a_stream_migrates_after_every_kind_of_failure(world: World, reason):
    await both(world, streams(2, fails(reason)))

    assert (await world.ask(prompt(stream=True))).body == ANSWER


@in_world()
async def test_after_lost_frames_a_stream_may_resume_on_its_worker(world: World):
    worker = await world.worker("w1", script=streams(2, loses_a_frame))
    connection, answering = world.begin(b'{"model":"m","prompt":"x","stream":true}')
    while not worker.started:
        await asyncio.sleep(0)
    worker.script = streams()
    await answering

    assert parse(connection.written).body == ANSWER
    assert worker.started[0].leg_id in worker.cancelled


@in_world(frame_gap_s_max=2.0)
async def test_a_silent_stream_migrates_and_its_old_leg_is_cancelled(world: World):
    w1, _w2 = await both(world, streams(3, falls_silent))

    response = await world.ask(prompt(stream=True))
    await settle()

    assert response.body == ANSWER
    assert w1.cancelled == [w1.started[0].leg_id]


@in_world()
async def test_both_legs_of_a_migrated_stream_get_its_tokens(world: World):
    p1, d1 = await world.pair(decode=streams(2, fails(Reason.WORKER_LOST)))
    d2 = await world.worker("d2", Role.DECODE, streams())
    give_legs(world, "d2", 5)

    response = await world.ask(prompt(stream=True), x_baton_mode="disaggregated")

    assert response.body == ANSWER
    assert [leg.resume for leg in p1.started] == [None, pack_tokens(TOKENS[:2])]
    assert [(leg.kind, leg.resume) for leg in d2.started] == [(LegKind.DECODE, pack_tokens(TOKENS[:2]))]
    assert d1.started[0].resume is None


@in_world()
async def test_a_resumed_leg_gets_token_groups_the_start_time_and_what_was_cached(world: World):
    def first(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(200, SSE)
        frames.data(b'data: {"created":17,"choices":[]}\n\n')
        frames.data(event(0), TOKENS[:1], None, 5)
        frames.data(event(1), TOKENS[1:4], [1, 2])
        frames.fail(Failure(reason=Reason.WORKER_DRAINING, message="as the test wants"))

    def second(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(200, SSE)
        frames.data(b'data: {"created":18,"choices":[]}\n\n', TOKENS[4:6], [1], 9)
        frames.fail(Failure(reason=Reason.WORKER_DRAINING, message="as the test wants"))

    w1, w2 = await both(world, first, second)
    w3 = await world.worker("w3", script=streams())
    give_legs(world, "w3", 9)

    await world.ask(prompt(stream=True))

    legs = [*w1.started, *w2.started, *w3.started]
    assert [leg.resume_joined for leg in legs] == [b"", pack_tokens([2, 3]), pack_tokens([2, 3, 5])]
    assert [leg.created for leg in legs] == [0, 17, 17]
    assert [leg.cached_tokens for leg in legs] == [None, 5, 5]


@in_world(failures=FailurePolicy(resumes_max=2))
async def test_migrations_are_bounded_and_then_the_client_gets_an_error(world: World):
    for number in range(6):
        await world.worker(f"w{number}", script=streams(1, fails(Reason.FRAMES_LOST)))

    response = await world.ask(prompt(stream=True), x_baton_mode="aggregated")

    assert response.body.startswith(ROLE + event(0) + event(1) + event(2) + b'data: {"error":')
    assert error_of(response.body)["code"] == "frames_lost"
    assert sum(len(worker.started) for worker in world.workers.values()) == 3


@pytest.mark.parametrize(("asked", "started"), [(0, 1), (1, 2), (50, 3)])
@in_world(failures=FailurePolicy(resumes_max=2))
async def test_clients_can_lower_but_not_raise_the_resume_maximum(world: World, asked, started):
    for number in range(6):
        await world.worker(f"w{number}", script=streams(1, fails(Reason.FRAMES_LOST)))

    await world.ask(prompt(stream=True, baton={"resumes_max": asked}), x_baton_mode="aggregated")

    assert sum(len(worker.started) for worker in world.workers.values()) == started


@pytest.mark.parametrize("value", [-1, 1.5, True, "1"])
@in_world()
async def test_invalid_resume_maximums_are_rejected(world: World, value):
    await world.worker("w1")

    response = await world.ask(prompt(baton={"resumes_max": value}))

    assert (response.status, response.error["param"]) == (400, "baton.resumes_max")


@pytest.mark.parametrize("fields", [{"n": 2}, {"echo": True}, {"prompt": ["a", "b"]}], ids=lambda one: next(iter(one)))
@in_world()
async def test_a_stream_that_cannot_be_resumed_ends_with_an_error(world: World, fields):
    _w1, w2 = await both(world, streams(2, fails(Reason.ENGINE_DEAD)))

    response = await world.ask(prompt(stream=True, **fields))

    assert error_of(response.body)["code"] == "engine_dead"
    assert "could not be resumed" in error_of(response.body)["message"]
    assert w2.started == []


@in_world()
async def test_a_worker_that_cannot_resume_ends_the_stream_with_its_reason(world: World):
    await both(world, streams(2, fails(Reason.ENGINE_DEAD)), streams(0, fails(Reason.CANNOT_RESUME)))

    response = await world.ask(prompt(stream=True))

    assert error_of(response.body)["code"] == "cannot_resume"
    assert DONE not in response.body


@in_world()
async def test_a_resume_rejected_by_the_engine_adds_nothing_to_the_stream(world: World):
    def refuse(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(400, JSON)
        frames.data(b'{"error":{"message":"too long"}}')
        frames.end(LegReport())

    await both(world, streams(2, fails(Reason.ENGINE_DEAD)), refuse)

    response = await world.ask(prompt(stream=True))

    assert response.status == 200
    assert error_of(response.body)["code"] == "cannot_resume"
    assert "too long" in error_of(response.body)["message"]


@in_world()
async def test_a_resume_tries_another_worker_if_one_is_full(world: World):
    def full(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(503, JSON)
        frames.end(LegReport())

    await both(world, streams(2, fails(Reason.ENGINE_DEAD)), full)
    await world.worker("w3", script=streams())
    give_legs(world, "w3", 9)

    assert (await world.ask(prompt(stream=True))).body == ANSWER


@in_world()
async def test_a_stream_is_complete_once_its_last_event_is_relayed(world: World):
    def done(frames: LegFrames) -> None:
        frames.data(DONE)
        frames.fail(Failure(reason=Reason.ENGINE_DEAD, message="just then"))

    _w1, w2 = await both(world, streams(how=done))

    response = await world.ask(prompt(stream=True))

    assert response.body == ANSWER
    assert w2.started == []


@in_world()
async def test_streams_migrate_only_within_their_model_and_revision(world: World):
    _w1, w2 = await both(world, streams(2, fails(Reason.ENGINE_DEAD)))
    cluster = world.router.fleet.cluster
    record = cluster.workers[w2.worker_id].record
    other = msgspec.structs.replace(record.fingerprint, revision="another")
    cluster.record(msgspec.structs.replace(record, fingerprint=other), world.router.clock.now())

    response = await world.ask(prompt(stream=True))

    assert error_of(response.body)["code"] == "engine_dead"
    assert w2.started == []


@in_world()
async def test_a_stream_waits_for_its_only_worker_to_restart(world: World):
    first = await world.worker("w1", script=streams(2, fails(Reason.ENGINE_DEAD)))
    connection, answering = world.begin(b'{"model":"m","prompt":"x","stream":true}')
    await asyncio.sleep(2)
    assert not answering.done()
    await first.vanish()

    second = await world.worker("w1", script=streams(), epoch=2)
    await answering

    assert parse(connection.written).body == ANSWER
    assert len(second.started) == 1


@in_world()
async def test_a_client_disconnect_ends_a_waiting_stream(world: World):
    await world.worker("w1", script=streams(2, fails(Reason.ENGINE_DEAD)))
    connection, answering = world.begin(b'{"model":"m","prompt":"x","stream":true}')
    await asyncio.sleep(2)

    connection.leave()
    await answering

    assert not world.router.relay.in_flight


@in_world()
async def test_a_failed_migration_reports_both_the_break_and_its_obstacle(world: World):
    await world.worker("w1", script=streams(2, fails(Reason.ENGINE_DEAD)))

    response = await world.ask(prompt(stream=True))

    error = error_of(response.body)
    assert error["code"] == "engine_dead"
    assert "as the test wants" in error["message"]
    assert "could not be resumed" in error["message"]


@in_world()
async def test_losing_a_forced_worker_does_not_end_the_stream(world: World):
    _w1, w2 = await both(world, streams(2, fails(Reason.ENGINE_DEAD)))

    response = await world.ask(prompt(stream=True, baton={"decode_worker": "w1", "mode": "aggregated"}))

    assert response.body == ANSWER
    assert len(w2.started) == 1


@in_world()
async def test_the_cache_threshold_does_not_apply_to_resumed_streams(world: World):
    _w1, w2 = await both(world, streams(2, fails(Reason.ENGINE_DEAD)), connector="baton-1")

    await world.ask(prompt(stream=True, cache_hit_threshold=0.9))

    assert [leg.cache_hit_threshold for leg in w2.started] == [0.0]


@in_world()
async def test_chats_migrate_even_after_only_the_role_event(world: World):
    await both(world, streams(0, fails(Reason.ENGINE_DEAD)))
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}

    assert (await world.ask(body, path=CHAT)).body == ANSWER


@in_world()
async def test_the_report_of_a_resumed_request_counts_its_resumes(world: World):
    reports = await world.reports()
    await both(world, streams(2, fails(Reason.ENGINE_DEAD)))
    await world.ask(prompt(stream=True))
    await asyncio.sleep(1)

    (finished,) = reports
    assert (finished.status, finished.reason, finished.attempts) == (200, "", 2)
    assert (finished.resumes, finished.resumed_tokens, finished.completion_tokens) == (1, 2, len(TOKENS))
    assert finished.ttft_parts is None
    registry = world.router.registry
    assert registry.get_sample_value("baton_router_resumes_total", {"reason": "engine_dead"}) == 1
    assert registry.get_sample_value("baton_router_resume_seconds_count") == 1


@in_world()
async def test_worker_loads_return_to_zero_after_a_resume(world: World):
    await both(world, streams(2, fails(Reason.ENGINE_DEAD)))
    for view in world.router.fleet.cluster.workers.values():
        view.own.legs = 0
    await world.ask(prompt(stream=True))

    views = world.router.fleet.cluster.workers.values()
    assert [(view.own.legs, view.own.tokens) for view in views] == [(0, 0), (0, 0)]


@in_world()
async def test_a_worker_restart_fails_its_legs_before_the_silence_timeout(world: World):
    first = await world.worker("w1", script=streams(2, falls_silent))
    connection, answering = world.begin(b'{"model":"m","prompt":"x","stream":true}')
    await settle()
    await first.vanish()
    begun = asyncio.get_running_loop().time()

    await world.worker("w1", script=streams(), epoch=2)
    await answering

    assert parse(connection.written).body == ANSWER
    assert asyncio.get_running_loop().time() - begun < 1.0
