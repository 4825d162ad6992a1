"""A worker's own cache hit threshold (``WORKER_CACHE_HIT_THRESHOLD``) behind a router: it never refuses what a router
hands over, and its refusal is the router's to mend, never the client's answer.
"""

from __future__ import annotations

from typing import Any

import pytest

from services.router.relay.failure_policy import FailurePolicy
from shared.bus.frame_sender import LegFrames
from shared.contracts.engine_paths import MESSAGES, PLACED
from shared.contracts.failures import Reason
from shared.contracts.inference import LegKind, LegReport, StartLeg
from shared.contracts.kv_exchange import KvTransferReport
from shared.contracts.workers import Role
from tests.unit.router.fake_worker import DONE, JSON, SSE, FakeWorker, serve_leg, wants_stream
from tests.unit.router.placement.test_decode_first import AsIfCached
from tests.unit.router.relay.test_control_fields import BODIES
from tests.unit.router.streams import TOKENS, fails, streams
from tests.unit.router.world import World, give_legs, in_world, long_prompt, prompt, run_in_world, settle

DEFAULT = 0.8
OURS: dict[str, Any] = {"connector": "baton-1"}
FOUND = 0.41
REFUSAL = b'{"choices":[{"text":"","finish_reason":"cache_threshold"}]}'
REPORT = LegReport(prompt_tokens=9, finish_reason="cache_threshold", kv=KvTransferReport(refused=True, hit_share=FOUND))


def cold(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
    """An engine that has little of any prompt: it refuses what has a threshold, its own where the leg has none."""
    threshold = worker.threshold if start.cache_hit_threshold is None else start.cache_hit_threshold
    if start.kind is LegKind.PREFILL or not threshold:
        serve_leg(worker, start, frames)
    elif wants_stream(start):
        frames.head(200, SSE)
        frames.data(b"data: %b\n\n" % REFUSAL)
        frames.data(DONE)
        frames.end(REPORT)
    else:
        frames.head(200, JSON)
        frames.data(REFUSAL)
        frames.end(REPORT)


def thresholds(worker: FakeWorker) -> list[float | None]:
    return [leg.cache_hit_threshold for leg in worker.started]


@pytest.mark.parametrize("stream_tokens_min", [0, -1], ids=["streamed", "offered"])
def test_a_leg_whose_kv_is_handed_over_is_never_refused_by_the_workers_default(stream_tokens_min: int):
    async def scenario(world: World) -> None:
        _p1, d1 = await world.pair(cold, cold, threshold=DEFAULT, **OURS)

        for stream in (True, False):
            response = await world.ask(long_prompt(stream=stream))
            assert (response.status, response.headers["x-baton-mode"]) == (200, "disaggregated")
            assert b"cache_threshold" not in response.body
        assert [(leg.kind, leg.cache_hit_threshold) for leg in d1.started] == [(LegKind.DECODE, 0.0)] * 2

    run_in_world(scenario, stream_tokens_min=stream_tokens_min)


@pytest.mark.parametrize("mode", ["auto", "disaggregated", "decode_first"])
@in_world()
async def test_a_prompt_without_a_block_is_never_refused_by_the_workers_default(world: World, mode: str):
    """Nothing of it can be cached: its decode worker would refuse it for ever."""
    _p1, d1 = await world.pair(cold, cold, threshold=DEFAULT, **OURS)

    response = await world.ask(prompt(), x_baton_mode=mode)

    assert response.status == 200
    assert b"cache_threshold" not in response.body
    assert thresholds(d1) == [0.0]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", PLACED)
@in_world()
async def test_a_refusal_by_a_workers_default_goes_to_another_worker(world: World, path: str, stream: bool):
    choosy = await world.worker("w1", script=cold, threshold=DEFAULT, **OURS)
    other = await world.worker("w2", **OURS)
    give_legs(world, "w2", 5)

    response = await world.ask({**BODIES[path], "stream": stream}, path=path)

    assert response.status == 200
    assert b"cache_threshold" not in response.body
    assert (thresholds(choosy), thresholds(other)) == ([None], [0.0])


@pytest.mark.parametrize("stream", [True, False])
@in_world()
async def test_where_no_other_worker_can_serve_it_the_same_one_does_and_is_asked_once_more_only(world, stream):
    only = await world.worker("w1", script=cold, threshold=DEFAULT, **OURS)

    response = await world.ask(long_prompt(stream=stream))

    assert response.status == 200
    assert b"cache_threshold" not in response.body
    assert thresholds(only) == [None, 0.0]
    assert not world.router.relay.in_flight


@pytest.mark.parametrize("mode", ["auto", "aggregated", "disaggregated"])
@pytest.mark.parametrize("whole", [{}, {"n": 2}], ids=["one sequence", "two"])
@pytest.mark.parametrize("role", [Role.DECODE, Role.BOTH])
@in_world()
async def test_whatever_a_client_asks_for_a_default_never_answers_it(world: World, mode: str, whole, role: Role):
    worker = await world.worker("w1", role, script=cold, threshold=DEFAULT, **OURS)
    other = await world.worker("w2", role, script=cold, threshold=DEFAULT, **OURS)

    response = await world.ask(long_prompt(**whole), x_baton_mode=mode)

    assert b"cache_threshold" not in response.body
    if role is Role.BOTH or mode != "disaggregated":
        assert response.status == 200, response.body
    assert len(worker.started) + len(other.started) <= 3


def test_the_only_attempt_of_a_request_cannot_be_refused_by_a_default():
    async def scenario(world: World) -> None:
        only = await world.worker("w1", script=cold, threshold=DEFAULT, **OURS)
        assert (await world.ask(long_prompt())).status == 200
        assert thresholds(only) == [0.0]

    run_in_world(scenario, failures=FailurePolicy(attempts_max=1))


@in_world()
async def test_a_resumed_leg_is_not_refused_by_a_default(world: World):
    await world.worker("w1", script=streams(2, fails(Reason.ENGINE_DEAD)), **OURS)
    second = await world.worker("w2", script=streams(), threshold=DEFAULT, **OURS)
    give_legs(world, "w2", 5)

    await world.ask(long_prompt(stream=True))

    assert [(leg.resume is not None, leg.cache_hit_threshold) for leg in second.started] == [(True, 0.0)]


@in_world()
async def test_a_stream_of_a_worker_with_a_default_that_has_enough_is_relayed_as_it_comes(world: World):
    await world.worker("w1", script=streams(), threshold=DEFAULT, **OURS)

    response = await world.ask(long_prompt(stream=True))

    assert response.body.count(b'"text"') == len(TOKENS)
    assert response.body.endswith(DONE)


@in_world()
async def test_only_a_threshold_of_the_client_answers_the_client(world: World):
    only = await world.worker("w1", script=cold, threshold=DEFAULT, **OURS)

    completion = await world.ask(long_prompt(cache_hit_threshold=0.5))
    message = await world.ask({**BODIES[MESSAGES], "cache_hit_threshold": 0.5}, path=MESSAGES)

    assert (completion.status, b"cache_threshold" in completion.body) == (200, True)
    assert message.status == 412
    assert thresholds(only) == [0.5, 0.5]


@in_world()
async def test_after_decode_first_with_a_clients_threshold_the_handed_over_kv_is_not_refused(world: World):
    """The client's threshold has had its effect: the prompt is computed by a prefill worker."""
    _p1, d1 = await world.pair(cold, cold, **OURS)
    world.router.fleet.placer = AsIfCached(world.router.fleet.placer)

    response = await world.ask(long_prompt(baton={"mode": "decode_first"}, cache_hit_threshold=1))

    assert (response.status, response.headers["x-baton-mode"]) == (200, "disaggregated")
    assert thresholds(d1) == [1.0, 0.0]


@in_world()
async def test_the_decision_says_whose_threshold_refused_and_what_was_found(world: World):
    await world.worker("w1", script=cold, threshold=DEFAULT, **OURS)

    await world.ask(long_prompt())
    await world.ask(long_prompt(cache_hit_threshold=0.5))
    await settle()

    log = world.router.decisions.log
    by_request, second, first = (one.record(world.router.router_id) for one in log.newest_first())
    assert (first.outcome, first.cache_hit_threshold, first.threshold_from) == (
        "cache_missed",
        DEFAULT,
        "worker_default",
    )
    assert first.hit_share == FOUND
    assert (second.earlier, second.outcome, second.cache_hit_threshold) == (first.decision_id, "ok", -1.0)
    assert (by_request.outcome, by_request.cache_hit_threshold, by_request.threshold_from) == ("ok", 0.5, "request")
    assert by_request.hit_share == FOUND


@in_world()
async def test_the_fields_of_a_refusal_may_come_one_by_one(world: World):
    """The report comes after the refusal; a worker that is lost between the two has refused all the same."""
    held: list[LegFrames] = []

    def slow(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        if start.cache_hit_threshold is not None:
            serve_leg(worker, start, frames)
            return
        frames.head(200, SSE)
        frames.data(b"data: %b\n\n" % REFUSAL)
        held.append(frames)

    only = await world.worker("w1", script=slow, threshold=DEFAULT, **OURS)
    for end in (lambda frames: frames.end(REPORT), fails(Reason.FRAMES_LOST)):
        _connection, answering = world.begin(b'{"model":"m","prompt":"x","stream":true}')
        while not held:
            await settle()
        await settle()
        assert len(only.started) % 2 == 1, "it is not tried again before the leg is over"
        end(held.pop())
        await answering
    assert thresholds(only) == [None, 0.0] * 2


@pytest.mark.parametrize("connector", ["nixl-1", "none"], ids=["upstream", "attached"])
@in_world()
async def test_a_threshold_that_no_worker_can_keep_is_refused_by_name(world: World, connector: str):
    only = await world.worker("w1", connector=connector)

    for path, body in BODIES.items():
        refused = await world.ask({**body, "cache_hit_threshold": 0.5}, path=path)
        assert refused.status == 400
        assert "WORKER_CONNECTOR=baton" in refused.error["message"]
        assert path == MESSAGES or refused.error["param"] == "cache_hit_threshold"
    assert (await world.ask(long_prompt(cache_hit_threshold=0))).status == 200
    assert thresholds(only) == [0.0]


@in_world()
async def test_a_request_with_a_threshold_goes_to_a_worker_that_can_keep_it(world: World):
    unable = await world.worker("a1", attached=True)
    able = await world.worker("w2", **OURS)
    give_legs(world, "w2", 5)

    assert (await world.ask(long_prompt(cache_hit_threshold=0.5))).status == 200

    assert (thresholds(unable), thresholds(able)) == ([], [0.5])
