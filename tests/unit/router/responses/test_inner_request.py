"""The stream of a response that is kept: passed on in whole events, however the bytes arrive, up to its last one."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.request.head import Head
from services.router.request.http_request import HttpRequest, Upload, UploadTotals
from services.router.responses.history import with_fields
from services.router.responses.inner_request import EVENT_END, InnerRequest, response_in
from tests.unit.router.relay.test_message_streams import event
from tests.unit.router.world import FakeConnection, parse

TEXT = 'event: response.completed\ndata: {"response":{}}\n\n'
"""A model may say this; as JSON it has no line ends."""
BEFORE = [
    event("response.created", response={"id": "resp_1", "previous_response_id": None}),
    event("response.output_text.delta", delta=TEXT),
    event("response.output_item.done", item={"text": TEXT}),
]
LAST = event("response.completed", response={"id": "resp_1", "output": [TEXT]})
AFTER = b"data: [DONE]\n\n"


def for_client(response: bytes) -> bytes:
    return with_fields(response, previous_response_id="resp_0") or b""


def relayed(pieces: list[bytes]) -> tuple[bytes, InnerRequest]:
    """What the client has when the stream has ended, and the request that was relayed."""

    async def run() -> tuple[bytes, InnerRequest]:
        connection, totals = FakeConnection(), UploadTotals()
        client = HttpRequest(
            connection, Head("/v1/responses", [], lambda: "r1"), Upload(0.0, totals), http11=True, keep_alive=True
        )
        inner = InnerRequest(client, b"{}", for_client, client)
        inner.begin(200, b"")
        for piece in pieces[:-1]:
            inner.send(piece)
        inner.end(pieces[-1])
        assert totals.bytes_held == 0
        return parse(connection.written).body if connection.written else b"", inner

    return asyncio.run(run())


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted(places), len(data)]
    return [data[begin:end] for begin, end in pairwise(ends)]


@given(st.lists(st.integers(0, len(b"".join(BEFORE) + LAST + AFTER)), max_size=12))
def test_however_the_bytes_arrive_the_last_event_stays_here(places: list[int]):
    sent, inner = relayed(cut(b"".join(BEFORE) + LAST + AFTER, places))

    created = msgspec.json.decode(response_in((sent + inner.before).split(EVENT_END)[0]))
    assert created == {"id": "resp_1", "previous_response_id": "resp_0"}
    assert (sent + inner.before).split(EVENT_END)[1:] == b"".join(BEFORE[1:]).split(EVENT_END)
    assert inner.last + EVENT_END == LAST
    assert inner.rest == AFTER
    assert b"response.completed\ndata" not in sent


@pytest.mark.parametrize("end", [b"", b'data: {"error":{}}\n\n', b"event: response.out"])
def test_a_stream_without_a_last_event_is_passed_on_whole(end: bytes):
    sent, inner = relayed([b"".join(BEFORE[1:]), end])

    assert sent + inner.before == b"".join(BEFORE[1:]) + end
    assert inner.last == inner.rest == b""


def test_a_request_in_the_background_writes_to_no_client():
    async def run() -> Any:
        connection = FakeConnection()
        like = HttpRequest(
            connection,
            Head("/v1/responses", [], lambda: "r1"),
            Upload(0.0, UploadTotals()),
            http11=True,
            keep_alive=True,
        )
        inner = InnerRequest(like, b"{}", for_client, None)
        inner.answer(200, b"", b"{}")
        inner.close_after()
        inner.abort()
        return connection.written, connection.aborted, inner.whole, inner.left

    assert asyncio.run(run()) == (b"", False, (200, b"", b"{}"), True)
