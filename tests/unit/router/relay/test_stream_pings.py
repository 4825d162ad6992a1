"""Streams whose clients get a sign of life while they have nothing to show (``ROUTER_STREAM_PING_S``)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.bus.frame_sender import LegFrames
from shared.contracts.failures import Failure, Reason
from shared.contracts.inference import LegReport, StartLeg
from tests.unit.router.fake_worker import DONE, EVENTS, JSON, SSE, WHOLE_RESPONSE, FakeWorker, serve_leg, wants_stream
from tests.unit.router.world import CHAT, COMPLETIONS, World, in_world, parse, prompt

PING = b": waiting\n\n"
MESSAGES_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
REFUSAL = b'{"error":{"message":"no such thing","type":"BadRequestError","param":"x","code":400}}'
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: prompt(stream=True),
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True},
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "stream": True},
    "/v1/responses": {"model": "m", "input": "x", "stream": True},
}


async def slow(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
    """Compute the prompt for 7 s; then answer."""
    if wants_stream(start):
        frames.head(200, SSE)
    await asyncio.sleep(7.0)
    if not wants_stream(start):
        serve_leg(worker, start, frames)
        return
    for event in EVENTS:
        frames.data(event, [1])
    frames.data(DONE)
    frames.end(LegReport())


async def drains(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
    await asyncio.sleep(5.0)
    frames.fail(Failure(reason=Reason.WORKER_DRAINING, message="as the test wants"))


async def fails(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
    await asyncio.sleep(5.0)
    frames.fail(Failure(reason=Reason.INTERNAL, message="as the test wants"))


async def refuses(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
    await asyncio.sleep(5.0)
    frames.head(400, JSON)
    frames.data(REFUSAL)
    frames.end(LegReport())


@in_world()
async def test_without_the_setting_nothing_precedes_the_first_event(world: World):
    await world.worker("w1", script=slow)

    assert (await world.ask(prompt(stream=True))).body == b"".join(EVENTS) + DONE


@in_world(stream_ping_s=2.0)
async def test_a_long_prompt_sends_the_head_and_comments_before_the_first_event(world: World):
    await world.worker("w1", script=slow)
    connection, answering = world.begin(b'{"model":"m","prompt":"x","stream":true}')
    await asyncio.sleep(1.9)
    assert connection.written == b""

    await asyncio.sleep(0.2)
    early = parse(connection.written)
    await answering

    assert (early.status, early.body) == (200, PING)
    assert early.headers["content-type"] == SSE
    assert (early.headers["cache-control"], early.headers["x-accel-buffering"]) == ("no-cache", "no")
    assert early.headers["x-request-id"]
    assert early.headers["x-baton-decision"]
    assert parse(connection.written).body == 3 * PING + b"".join(EVENTS) + DONE
    assert connection.written.count(b"HTTP/1.1") == 1


@in_world(stream_ping_s=2.0)
async def test_an_answer_that_is_not_streamed_gets_no_comment(world: World):
    await world.worker("w1", script=slow)

    response = await world.ask(prompt())

    assert (response.status, response.body) == (200, WHOLE_RESPONSE)


@in_world(stream_ping_s=2.0)
async def test_after_an_early_head_another_worker_may_serve_the_whole_request(world: World):
    w1 = await world.worker("w1", script=drains)
    _connection, answering = world.begin(b'{"model":"m","prompt":"x","stream":true}')
    while not w1.started:
        await asyncio.sleep(0)
    w2 = await world.worker("w2")
    await answering

    assert parse(_connection.written).body == 2 * PING + b"".join(EVENTS) + DONE
    assert w2.started[0].resume is None


@pytest.mark.parametrize(
    ("path", "last"),
    [
        (COMPLETIONS, b'data: {"error":{"message":"as the test wants"'),
        (CHAT, b'data: {"error":{"message":"as the test wants"'),
        ("/v1/messages", b'event: error\ndata: {"type":"error","error":{'),
        ("/v1/responses", b'event: response.failed\ndata: {"type":"response.failed"'),
    ],
)
@in_world(stream_ping_s=2.0)
async def test_a_failure_after_an_early_head_is_an_event_in_the_form_of_the_path(world: World, path: str, last: bytes):
    await world.worker("w1", script=fails)

    response = await world.ask(BODIES[path], path=path)

    ping = MESSAGES_PING if path == "/v1/messages" else PING
    assert response.status == 200
    assert response.body.startswith(2 * ping + last)
    assert response.body.endswith(b"}\n\n")
    assert b"as the test wants" in response.body


@pytest.mark.parametrize(
    ("path", "last"),
    [
        (COMPLETIONS, b"data: " + REFUSAL),
        (
            "/v1/messages",
            b'event: error\ndata: {"type":"error","error":{"type":"invalid_request_error","message":"no such thing","code":400}}',
        ),
    ],
)
@in_world(stream_ping_s=2.0)
async def test_an_engines_refusal_after_an_early_head_is_an_event(world: World, path: str, last: bytes):
    await world.worker("w1", script=refuses)

    response = await world.ask(BODIES[path], path=path)

    ping = MESSAGES_PING if path == "/v1/messages" else PING
    assert (response.status, response.body) == (200, 2 * ping + last + b"\n\n")


@in_world(stream_ping_s=2.0)
async def test_a_quiet_stream_gets_comments_between_its_events_and_never_within_one(world: World):
    async def script(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(200, SSE)
        for piece in (EVENTS[0], EVENTS[1][:5], EVENTS[1][5:]):
            frames.data(piece)
            await asyncio.sleep(3.0)
        for _ in range(8):
            frames.data(EVENTS[2])
            await asyncio.sleep(1.0)
        frames.data(DONE)
        frames.end(LegReport())

    await world.worker("w1", script=script)

    response = await world.ask(prompt(stream=True))

    assert response.body == EVENTS[0] + PING + EVENTS[1] + PING + 8 * EVENTS[2] + DONE
