"""Each recovery action works, in the operator's order."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from services.router.request.errors import failed
from shared.bus.frame_sender import LegFrames
from shared.contracts.failures import Failure, Reason
from shared.contracts.inference import LegKind, LegReport, StartLeg
from shared.contracts.workers import Role
from tests.unit.router.fake_worker import DONE, JSON, SSE, WHOLE_RESPONSE, FakeWorker, serve_leg
from tests.unit.router.relay.test_migration import error_of
from tests.unit.router.streams import ANSWER, ROLE, TOKENS, event, fails, streams
from tests.unit.router.world import World, give_legs, in_world, long_prompt, prompt, run_in_world

REFUSAL = b'{"choices":[{"text":"","finish_reason":"cache_threshold"}]}'


def failing(reason: Reason):
    return lambda _worker, _start, frames: fails(reason)(frames)


def refusing(after: int = 0):
    """Stream that many tokens, then refuse for missing KV; compute everything if the leg allows it."""

    def script(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        guarded = start.kind is LegKind.DECODE and bool(start.cache_hit_threshold)
        if not guarded:
            streams()(worker, start, frames) if b'"stream":true' in start.body else serve_leg(worker, start, frames)
            return
        report = LegReport(prompt_tokens=9, finish_reason="cache_threshold")
        if b'"stream":true' not in start.body:
            frames.head(200, JSON)
            frames.data(REFUSAL)
            frames.end(report)
            return
        frames.head(200, SSE)
        relayed = len(start.resume or b"") // 4
        for number in range(relayed, relayed + after):
            frames.data(event(number), [TOKENS[number]])
        frames.data(b"data: " + REFUSAL + b"\n\n")
        frames.data(DONE)
        frames.end(report)

    return script


def with_policy(tmp_path: Path, text: str) -> dict[str, Any]:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return {"failure_policy": str(path)}


@in_world()
async def test_another_worker_replaces_a_failed_prefill_worker(world: World):
    await world.pair(prefill=failing(Reason.WORKER_LOST))
    await world.worker("p2", Role.PREFILL)
    give_legs(world, "p2", 5)

    response = await world.ask(prompt())

    assert (response.status, response.headers["x-baton-prefill-worker"]) == (200, "p2")


@in_world()
async def test_without_prefill_workers_the_decode_worker_computes_the_prompt(world: World):
    _p1, d1 = await world.pair(prefill=failing(Reason.ENGINE_DEAD))

    response = await world.ask(prompt())

    assert (response.status, response.headers["x-baton-mode"]) == (200, "aggregated")
    assert [leg.kind for leg in d1.started] == [LegKind.AGGREGATED]


def test_the_operator_can_forbid_prompts_on_decode_workers(tmp_path):
    async def scenario(world: World) -> None:
        _p1, d1 = await world.pair(prefill=failing(Reason.ENGINE_DEAD))

        response = await world.ask(prompt())

        assert (response.status, response.error["code"]) == (503, "no_worker")
        assert d1.started == []

    run_in_world(scenario, **with_policy(tmp_path, '[actions]\nprefill_lost = ["another_prefill", "refuse"]'))


@in_world()
async def test_a_disaggregated_request_never_falls_back_to_one_worker(world: World):
    _p1, d1 = await world.pair(prefill=failing(Reason.ENGINE_DEAD))

    response = await world.ask(prompt(), x_baton_mode="disaggregated")

    assert response.status == 503
    assert d1.started == []


def test_the_operator_can_have_broken_streams_end(tmp_path):
    async def scenario(world: World) -> None:
        for name in ("w1", "w2"):
            await world.worker(name, script=streams(2, fails(Reason.ENGINE_DEAD)))

        response = await world.ask(prompt(stream=True))

        assert error_of(response.body)["code"] == "engine_dead"
        assert sum(len(worker.started) for worker in world.workers.values()) == 1

    run_in_world(scenario, **with_policy(tmp_path, '[actions]\ndecode_lost = ["another_decode", "refuse"]'))


def test_waiting_lasts_exactly_the_operators_maximum(tmp_path):
    async def scenario(world: World) -> None:
        await world.worker("w1", script=failing(Reason.WORKER_LOST))
        begun = asyncio.get_running_loop().time()

        response = await world.ask(prompt())

        assert response.status == 503
        assert asyncio.get_running_loop().time() - begun == pytest.approx(12.0, abs=0.5)

    run_in_world(scenario, **with_policy(tmp_path, "wait_s_max = 12"))


@in_world()
async def test_a_full_worker_is_tried_again_later(world: World):
    times: list[float] = []

    def full_at_first(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        times.append(asyncio.get_running_loop().time())
        if len(times) == 1:
            frames.fail(Failure(reason=Reason.WORKER_BUSY, message="full"))
        else:
            serve_leg(worker, start, frames)

    await world.worker("w1", script=full_at_first)

    assert (await world.ask(prompt())).status == 200
    assert times[1] > times[0]


@in_world()
async def test_by_default_decode_workers_compute_missing_kv(world: World):
    _p1, d1 = await world.pair(decode=refusing())

    response = await world.ask(prompt())

    assert response.status == 200
    assert [leg.cache_hit_threshold for leg in d1.started] == [0.0]


@pytest.mark.parametrize("stream", [True, False])
def test_the_operator_can_have_rejected_handoffs_prefilled_again(tmp_path, stream):
    async def scenario(world: World) -> None:
        p1, d1 = await world.pair()

        def refuses_once(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
            good = streams() if stream else serve_leg
            (refusing() if len(worker.started) == 1 else good)(worker, start, frames)

        d1.script = refuses_once

        response = await world.ask(prompt(stream=stream))

        assert response.body == (ANSWER if stream else WHOLE_RESPONSE)
        assert [len(p1.started), len(d1.started)] == [2, 2]

    text = '[actions]\nhandoff_refused = ["bounce_to_prefill", "prefill_on_decode", "refuse"]'
    run_in_world(scenario, **with_policy(tmp_path, text))


def test_a_rejected_handoff_is_prefilled_again_only_once(tmp_path):
    async def scenario(world: World) -> None:
        p1, d1 = await world.pair(decode=refusing())

        response = await world.ask(prompt())

        assert response.body == WHOLE_RESPONSE
        assert [len(p1.started), [leg.kind for leg in d1.started]] == [
            2,
            [LegKind.DECODE, LegKind.DECODE, LegKind.AGGREGATED],
        ]

    text = '[actions]\nhandoff_refused = ["bounce_to_prefill", "prefill_on_decode", "refuse"]'
    run_in_world(scenario, **with_policy(tmp_path, text))


def test_a_rejected_handoff_can_fall_back_to_the_decode_worker(tmp_path):
    async def scenario(world: World) -> None:
        _p1, d1 = await world.pair(decode=refusing())

        response = await world.ask(prompt())

        assert response.body == WHOLE_RESPONSE
        assert d1.started[-1].kind is LegKind.AGGREGATED
        assert not d1.started[-1].cache_hit_threshold

    text = '[actions]\ndecode_preempted = ["resume", "refuse"]'
    run_in_world(scenario, **with_policy(tmp_path, text))


def test_the_operator_can_have_preempted_streams_migrated(tmp_path):
    async def scenario(world: World) -> None:
        await world.pair(decode=refusing(after=3))
        d2 = await world.worker("d2", Role.DECODE, streams())
        give_legs(world, "d2", 5)

        response = await world.ask(prompt(stream=True))

        assert response.body == ANSWER.removeprefix(ROLE)
        assert [len(leg.resume or b"") // 4 for leg in d2.started if leg.resume is not None] == [3]

    text = '[actions]\ndecode_preempted = ["resume", "refuse"]'
    run_in_world(scenario, **with_policy(tmp_path, text))


def test_a_clients_cache_threshold_overrides_bounce_to_prefill(tmp_path):
    async def scenario(world: World) -> None:
        _p1, d1 = await world.pair(decode=refusing(), connector="baton-1")

        response = await world.ask(long_prompt(cache_hit_threshold=0.5), x_baton_mode="disaggregated")

        assert response.body == REFUSAL
        assert [leg.cache_hit_threshold for leg in d1.started] == [0.5]

    text = '[actions]\nhandoff_refused = ["bounce_to_prefill", "refuse"]'
    run_in_world(scenario, **with_policy(tmp_path, text))


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -5.0, 1e300])
def test_invalid_retry_times_are_not_passed_on(seconds: float):
    refusal = failed(Reason.WORKER_BUSY, "busy", seconds)

    assert dict(refusal.headers())[b"retry-after"] == b"1"
