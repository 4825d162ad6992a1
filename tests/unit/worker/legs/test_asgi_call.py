"""Calls of the engine's server: cancellation, errors, and which events are sent with which tokens."""

from __future__ import annotations

import asyncio

import pytest

from services.worker.engines.port import AsgiApp, AsgiMessage, LegResult
from services.worker.legs.asgi_call import LISTEN_S_MAX, AsgiCall
from tests.support.builders import start_leg

SOON_S = 30.0


class Nobody:
    """An answer that must not come."""

    def head(self, status: int, content_type: str) -> None:
        raise AssertionError("nobody waits")

    def data(self, data: bytes, token_ids=(), joined=None, cached_tokens=None) -> None:
        raise AssertionError("nobody waits")

    async def drain(self) -> None:
        return


async def no_server_error() -> None:
    return


def call() -> AsgiCall:
    return AsgiCall(start_leg(), b"{}", Nobody(), no_server_error)


async def cancelled(app: AsgiApp, computing: asyncio.Event) -> None:
    """A call of this app is cancelled while the app computes."""
    running = asyncio.create_task(call().run(app))
    await computing.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def compute(begun: asyncio.Event, ended: asyncio.Event) -> None:
    begun.set()
    try:
        await asyncio.Event().wait()
    finally:
        ended.set()


async def test_cancelling_a_call_disconnects_the_server_first():
    """As vLLM's does for answers that are not streamed."""
    computing, ended = asyncio.Event(), asyncio.Event()

    async def app(_scope, receive, send) -> None:
        await receive()
        tasks = [asyncio.create_task(compute(computing, ended)), asyncio.create_task(receive())]
        _done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    await cancelled(app, computing)

    await asyncio.wait_for(ended.wait(), SOON_S)


async def test_a_busy_server_aborts_its_request_before_it_is_cancelled():
    """vLLM's server passes a cancellation on to its request only after a disconnect."""
    computing, aborted = asyncio.Event(), asyncio.Event()

    async def app(_scope, receive, _send) -> None:
        await receive()
        computation = asyncio.create_task(compute(computing, aborted))
        await receive()
        await asyncio.sleep(2 * LISTEN_S_MAX)  # other requests
        computation.cancel()

    await cancelled(app, computing)

    await asyncio.wait_for(aborted.wait(), SOON_S)


async def test_a_server_that_ignores_a_disconnect_is_cancelled():
    computing, ended = asyncio.Event(), asyncio.Event()

    async def app(_scope, _receive, _send) -> None:
        await compute(computing, ended)

    await cancelled(app, computing)

    await asyncio.wait_for(ended.wait(), SOON_S)


async def test_exceptions_of_the_server_propagate():
    async def app(_scope, _receive, _send) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await call().run(app)


class Sent:
    """What a router gets."""

    def __init__(self) -> None:
        self.pieces: list[tuple[bytes, list[int], list[int] | None]] = []

    def head(self, status: int, content_type: str) -> None:
        assert (status, content_type) == (200, "text/event-stream")

    def data(self, data: bytes, token_ids=(), joined=None, cached_tokens=None) -> None:
        self.pieces.append((data, list(token_ids), joined))

    async def drain(self) -> None:
        return


def server(result: LegResult, said: list[tuple[list[int], list[bytes]]], ending: list[bytes]) -> AsgiApp:
    """Streams an opening, the events that each output's tokens make, and an ending, as vLLM's server does."""

    async def app(_scope, receive, send) -> None:
        async def tell(events: list[bytes]) -> None:
            for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})

        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        result.sequence_began()
        await tell([b"created "])
        for tokens, events in said:
            result.add_tokens(tokens, last=False)
            await tell(events)
            await result.shown()
        result.sequence_ended()
        await tell([*ending, b""])

    return app


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_all_events_of_a_token_are_sent_with_it_and_none_without(path):
    sent = Sent()
    called = AsgiCall(start_leg(path=path), b"{}", sent, no_server_error)
    said = [([1], [b"added ", b"delta "]), ([2], []), ([3, 4], [b"done ", b"added ", b"delta "]), ([5], [])]

    await called.run(server(called.result, said, [b"stop ", b"end "]))
    before_the_end = list(sent.pieces)
    called.finish()

    assert before_the_end == [(b"created added delta ", [1], None), (b"done added delta ", [2, 3, 4], [2])]
    assert sent.pieces[2:] == [(b"stop end ", [5], None)]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_the_router_is_told_of_tokens_that_show_nothing(path):
    """Hidden thoughts, or a tool call that the server's parser keeps until it is whole."""
    sent, begun = Sent(), []
    called = AsgiCall(start_leg(path=path), b"{}", sent, no_server_error, lambda: begun.append(len(sent.pieces)))
    told = []

    async def app(_scope, receive, send) -> None:
        async def step(tokens: list[int], event: bytes = b"") -> None:
            """A second of the engine's work."""
            if tokens:
                called.result.add_tokens(tokens, last=False)
            if event:
                await send(part(event, more=True))
            await called.result.shown()
            called.tell_of_tokens()
            told.append([data for data, _ids, _joined in sent.pieces])
            sent.pieces.clear()

        await receive()
        called.tell_of_tokens()  # Nothing has been answered yet.
        await send(head_of(b"text/event-stream"))
        called.result.sequence_began()
        await step([])
        await step([1])
        await step([2, 3])
        await step([])
        await step([4], b"four ")
        await step([5])
        called.result.sequence_ended()
        await step([6])

    await called.run(app)

    assert told == [[], [b""], [b""], [], [b"four "], [b""], []]
    assert begun == [0], "the leg's deadline holds until the first token, whether it shows anything or not"


async def test_only_streams_tell_of_tokens():
    sent = Sent()
    called = AsgiCall(start_leg(), b"{}", sent, no_server_error, lambda: sent.pieces.append((b"began", [], None)))

    async def app(_scope, receive, send) -> None:
        await receive()
        called.result.sequence_began()
        for token in range(3):
            called.result.add_tokens([token], last=False)
            called.tell_of_tokens()

    await called.run(app)

    assert sent.pieces == []


class Log:
    """A response whose parts it keeps, in order."""

    def __init__(self) -> None:
        self.parts: list[object] = []

    def head(self, status: int, content_type: str) -> None:
        self.parts.append((status, content_type))

    def data(self, data: bytes, token_ids=(), joined=None, cached_tokens=None) -> None:
        self.parts.append(data)

    async def drain(self) -> None:
        return


def part(data: bytes, *, more: bool) -> AsgiMessage:
    return {"type": "http.response.body", "body": data, "more_body": more}


def head_of(content_type: bytes, status: int = 200) -> AsgiMessage:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type)]}


async def relayed(*messages: AsgiMessage) -> tuple[list[list[object]], list[object]]:
    """What has been relayed after each of the server's messages, and in the end."""
    log, after = Log(), []
    served = AsgiCall(start_leg(), b"{}", log, no_server_error)

    async def app(_scope, _receive, send) -> None:
        for message in messages:
            await send(message)
            after.append(list(log.parts))

    await served.run(app)
    served.finish()
    return after, log.parts


@pytest.mark.parametrize("status", [200, 400])
async def test_a_response_sent_whole_goes_with_the_legs_end(status):
    """One message on the bus instead of two: the router needs the end, too."""
    meanwhile, done = await relayed(head_of(b"application/json", status), part(b"{}", more=False))

    assert meanwhile == [[], []]
    assert done == [(status, "application/json"), b"{}"]


async def test_a_response_in_pieces_is_relayed_as_it_comes():
    meanwhile, done = await relayed(head_of(b"audio/wav"), part(b"a", more=True), part(b"b", more=False))

    head = (200, "audio/wav")
    assert meanwhile == [[], [head, b"a"], [head, b"a", b"b"]]
    assert done == meanwhile[-1]


async def test_a_streams_head_is_relayed_at_once():
    meanwhile, done = await relayed(head_of(b"text/event-stream; charset=utf-8"), part(b"data: 1\n\n", more=False))

    assert meanwhile[0] == [(200, "text/event-stream; charset=utf-8")]
    assert done == [*meanwhile[0], b"data: 1\n\n"]


async def test_a_response_without_a_body_still_has_its_head():
    _meanwhile, done = await relayed(head_of(b"application/json", 204))

    assert done == [(204, "application/json")]
