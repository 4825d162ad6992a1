"""Whatever becomes of the two legs of a streamed handoff, and whenever: the request ends, and nothing of it goes on."""

from __future__ import annotations

import asyncio

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.router.settings import Settings
from shared.bus.frame_sender import LegFrames
from shared.contracts.failures import Failure, Reason
from shared.contracts.inference import LegKind, LegReport, StartLeg
from shared.contracts.workers import Role
from tests.support.examples import examples
from tests.support.virtual_time import run_in_virtual_time
from tests.unit.router.fake_worker import DONE, EVENTS, JSON, SSE, FakeWorker
from tests.unit.router.world import World, long_prompt, open_world, parse, settle

SETTINGS = Settings(
    stream_tokens_min=0, first_frame_s_max=5.0, frame_gap_s_max=10.0, request_s_max=60.0, log_requests=False
)
ENDS = st.sampled_from(["well", "well", "refused", "full", "lost", "engine dead", "never"])
SECONDS = st.sampled_from([0.0, 0.0, 0.01, 1.0, 3.0, 20.0])
LEGS = st.lists(st.tuples(SECONDS, st.booleans(), SECONDS, ENDS), min_size=1, max_size=3)
"""For each leg that a worker gets: when it begins, whether with data, how much later it ends, and how."""
FAILURES = {"lost": Reason.WORKER_LOST, "engine dead": Reason.ENGINE_DEAD}
STATUS = {"refused": 400, "full": 503}


def is_good(leg) -> bool:
    begins_s, _with_data, lasts_s, end = leg
    return end == "well" and begins_s + lasts_s < SETTINGS.first_frame_s_max


def playing(legs):
    async def script(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        begins_s, with_data, lasts_s, end = legs[min(len(worker.started), len(legs)) - 1]
        await asyncio.sleep(begins_s)
        if end in STATUS:
            frames.head(STATUS[end], JSON)
            frames.data(b'{"error":{}}')
            frames.end(LegReport())
            return
        if with_data and start.kind is not LegKind.PREFILL:
            frames.head(200, SSE)
            frames.data(EVENTS[0])
        await asyncio.sleep(lasts_s)
        if end in FAILURES:
            frames.fail(Failure(reason=FAILURES[end], message="as the test wants"))
        elif end == "well":
            if frames._seq == 0:
                frames.head(200, JSON if start.kind is LegKind.PREFILL else SSE)
            if start.kind is not LegKind.PREFILL:
                frames.data(DONE)
            frames.end(LegReport())

    return script


async def serve_one(world: World, leaves_s: float | None):
    connection, answering = world.begin(msgspec.json.encode(long_prompt(stream=True)))
    if leaves_s is not None:
        await asyncio.wait([answering], timeout=leaves_s)
        if not answering.done():
            connection.leave()
    async with asyncio.timeout(SETTINGS.request_s_max + 10):
        await answering
    await settle()
    return connection


def nothing_goes_on(world: World) -> None:
    for worker in world.workers.values():
        for leg_id, frames in worker.frames.items():
            assert frames.ended or leg_id in worker.cancelled, f"{worker.worker_id} still serves {leg_id}"
    views = world.router.fleet.cluster.workers.values()
    assert [(view.own.legs, view.own.tokens) for view in views] == [(0, 0)] * len(views)
    assert not world.router.inbox._legs
    assert not world.router.relay.in_flight
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "prefill-leg"]


@settings(max_examples=examples(75), deadline=None)
@given(LEGS, LEGS, st.none() | SECONDS, st.integers(0, 1))
@example([(1.0, False, 0.0, "lost")], [(1.0, True, 0.0, "lost")], None, 0)
@example([(0.0, False, 0.0, "refused")], [(0.0, True, 0.0, "well")], None, 0)
@example([(0.0, False, 0.0, "refused")], [(0.0, True, 1.0, "well")], None, 0)
@example([(0.0, False, 0.0, "never")], [(0.0, True, 0.0, "well")], None, 0)
def test_a_request_ends_and_takes_everything_with_it(prefill_legs, decode_legs, leaves_s, more_workers):
    async def scenario() -> None:
        async with open_world(SETTINGS) as world:
            for number in range(1 + more_workers):
                await world.worker(f"p{number}", Role.PREFILL, playing(prefill_legs), connector="baton-1")
                await world.worker(f"d{number}", Role.DECODE, playing(decode_legs), connector="baton-1")

            connection = await serve_one(world, leaves_s)

            nothing_goes_on(world)
            if not connection.http_request.left:
                answer = parse(connection.written)
                assert answer.body.endswith(DONE) or b'"error"' in answer.body
                assert answer.status == 200 or not (is_good(prefill_legs[0]) and is_good(decode_legs[0]))

    run_in_virtual_time(scenario())
