"""Broken streams of messages and responses: the client gets every event once, or an error that its SDK understands."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.router.relay.failure_policy import FailurePolicy
from shared.bus.frame_sender import LegFrames
from shared.contracts.failures import Failure, Reason
from shared.contracts.inference import LegReport, StartLeg, pack_tokens, unpack_tokens
from tests.unit.router.fake_worker import SSE, FakeWorker, Script
from tests.unit.router.world import CHAT, World, give_legs, in_world

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    MESSAGES: {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "stream": True},
    RESPONSES: {"model": "m", "input": "x", "stream": True},
}
TOKENS = [5, 6, 7]
CREATED = 17


def event(name: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))


BEGINNINGS = {
    MESSAGES: event("message_start", message={"id": "m1"}) + event("content_block_start", index=0),
    RESPONSES: event("response.created", response={"id": "resp_1", "created_at": CREATED}),
}
ENDINGS = {
    MESSAGES: event("content_block_stop", index=0) + event("message_delta") + event("message_stop"),
    RESPONSES: event("response.completed", response={"id": "resp_1", "text": "\n\nevent: x"}),
}


def deltas(path: str) -> list[bytes]:
    name = "content_block_delta" if path == MESSAGES else "response.output_text.delta"
    return [event(name, delta=str(token)) for token in TOKENS]


def stream(path: str) -> bytes:
    return BEGINNINGS[path] + b"".join(deltas(path)) + ENDINGS[path]


def says(path: str, tokens: int = len(TOKENS), *, ends: bool = True, breaks: bool = False) -> Script:
    """A worker that sends what is said of this many tokens of the answer, as far as the client does not have it."""

    def script(_worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        relayed = len(unpack_tokens(start.resume)) if start.resume is not None else 0
        frames.head(200, SSE)
        for number, delta in enumerate(deltas(path)[relayed:tokens], start=relayed):
            frames.data(delta if number else BEGINNINGS[path] + delta, [TOKENS[number]])
        if ends:
            frames.data(ENDINGS[path])
        if breaks:
            frames.fail(Failure(reason=Reason.ENGINE_DEAD, message="as the test wants"))
        else:
            frames.end(LegReport(prompt_tokens=9, completion_tokens=len(TOKENS)))

    return script


async def two_workers(world: World, first: Script, second: Script) -> tuple[FakeWorker, FakeWorker]:
    """The router tries the first one first."""
    one, other = await world.worker("w1", script=first), await world.worker("w2", script=second)
    give_legs(world, "w2", 5)
    return one, other


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("relayed", range(1, len(TOKENS) + 1))
@in_world()
async def test_a_broken_stream_continues_on_another_worker(world: World, path, relayed):
    w1, w2 = await two_workers(world, says(path, relayed, ends=False, breaks=True), says(path))

    response = await world.ask(BODIES[path], path=path)

    assert (response.status, response.body) == (200, stream(path))
    (first,), (second,) = w1.started, w2.started
    assert second.resume == pack_tokens(TOKENS[:relayed])
    assert (first.created, second.created) == (0, CREATED if path == RESPONSES else 0)
    assert first.answer_id == second.answer_id
    assert bool(first.answer_id) == (path == RESPONSES)


@in_world()
async def test_every_response_has_an_answer_id_of_its_own(world: World):
    worker = await world.worker("w1", script=says(RESPONSES))

    for _ in range(3):
        await world.ask(BODIES[RESPONSES], path=RESPONSES)

    assert len({leg.answer_id for leg in worker.started}) == 3


@pytest.mark.parametrize("path", BODIES)
@in_world()
async def test_a_stream_whose_last_event_has_come_is_complete(world: World, path):
    _w1, w2 = await two_workers(world, says(path, breaks=True), says(path))

    response = await world.ask(BODIES[path], path=path)

    assert response.body == stream(path)
    assert w2.started == []


@in_world(failures=FailurePolicy(resumes_max=0))
async def test_a_broken_stream_of_a_message_ends_with_an_error_that_clients_of_messages_know(world: World):
    await world.worker("w1", script=says(MESSAGES, 1, ends=False, breaks=True))

    response = await world.ask(BODIES[MESSAGES], path=MESSAGES)

    begun = BEGINNINGS[MESSAGES] + deltas(MESSAGES)[0]
    assert response.body.startswith(begun + b"event: error\ndata: {")
    name, data = response.body.removeprefix(begun).removesuffix(b"\n\n").split(b"\n")
    error = msgspec.json.decode(data.removeprefix(b"data: "))
    assert (name, error["type"]) == (b"event: error", "error")
    assert (error["error"]["type"], error["error"]["code"]) == ("api_error", "engine_dead")


@in_world(failures=FailurePolicy(resumes_max=0))
async def test_a_broken_stream_of_a_response_ends_with_that_response_failed(world: World):
    numbered = event("response.output_text.delta", sequence_number=41, delta='"sequence_number":99}')

    def breaks(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(200, SSE)
        frames.data(BEGINNINGS[RESPONSES], [])
        frames.data(numbered, [5])
        frames.fail(Failure(reason=Reason.ENGINE_DEAD, message="as the test wants"))

    await world.worker("w1", script=breaks)

    response = await world.ask(BODIES[RESPONSES], path=RESPONSES)

    begun = BEGINNINGS[RESPONSES] + numbered
    name, data = response.body.removeprefix(begun).removesuffix(b"\n\n").split(b"\n")
    failed = msgspec.json.decode(data.removeprefix(b"data: "))
    assert (name, failed["type"], failed["sequence_number"]) == (b"event: response.failed", "response.failed", 42)
    assert (failed["response"]["id"], failed["response"]["status"]) == ("resp_1", "failed")
    assert failed["response"]["error"]["code"] == "engine_dead"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"previous_response_id": "resp_0"}, "the previous response is kept by a server"),
        ({"background": True}, "the server keeps a response"),
        ({"tools": [{"type": "web_search_preview"}]}, "the server runs its tools"),
    ],
)
@in_world()
async def test_a_response_of_which_a_server_knows_more_is_not_resumed(world: World, fields, why):
    _w1, w2 = await two_workers(world, says(RESPONSES, 1, ends=False, breaks=True), says(RESPONSES))

    response = await world.ask({**BODIES[RESPONSES], **fields}, path=RESPONSES)

    assert b"could not be resumed: " + why.encode() in response.body
    assert w2.started == []


@in_world()
async def test_counting_tokens_goes_to_one_worker(world: World):
    def counts(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(200, "application/json")
        frames.data(b'{"input_tokens":4}')
        frames.end(LegReport())

    worker = await world.worker("w1", script=counts)
    path, body = "/v1/messages/count_tokens", {"model": "m", "messages": [{"role": "user", "content": "x"}]}

    response = await world.ask(body, path=path)

    assert (response.status, response.body) == (200, b'{"input_tokens":4}')
    assert [(leg.path, msgspec.json.decode(leg.body)) for leg in worker.started] == [(path, body)]
    assert response.headers["x-baton-mode"] == "aggregated"


@in_world()
async def test_chats_draw_their_own_ids(world: World):
    worker = await world.worker("w1")

    await world.ask(BODIES[MESSAGES], path=CHAT)

    assert [leg.answer_id for leg in worker.started] == [""]
