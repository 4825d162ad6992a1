"""Ambiguous request boundaries are rejected, and neither clients nor workers inject response headers."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress

import pytest

from services.router.request.http_request import header_value
from shared.bus.frame_sender import LegFrames
from shared.contracts.inference import LegReport, StartLeg
from tests.unit.router.fake_worker import JSON, FakeWorker
from tests.unit.router.http.test_http_server import BODY, PATIENCE_S, request, running
from tests.unit.router.world import COMPLETIONS, prompt

LINE = f"POST {COMPLETIONS} HTTP/1.1".encode()
HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def head(*lines: bytes, line: bytes = LINE) -> bytes:
    return b"\r\n".join([line, b"host: x", *lines, b"", b""])


def length(body: bytes = BODY) -> bytes:
    return b"content-length: %d" % len(body)


def chunked(*parts: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + end


TE = b"transfer-encoding: chunked"
AMBIGUOUS = {
    "length and chunks": head(length(), TE) + chunked(BODY) + HIDDEN,
    "chunks and length": head(TE, length()) + chunked(BODY) + HIDDEN,
    "two lengths": head(length(), b"content-length: 3") + BODY + HIDDEN,
    "the same length twice": head(length(), length()) + BODY + HIDDEN,
    "a list of lengths": head(b"content-length: 3, 3") + BODY + HIDDEN,
    "a length with a sign": head(b"content-length: +3") + BODY + HIDDEN,
    "a negative length": head(b"content-length: -1") + BODY + HIDDEN,
    "a length in hexadecimal": head(b"content-length: 0x10") + BODY + HIDDEN,
    "a length of 40 digits": head(b"content-length: " + b"9" * 40) + BODY + HIDDEN,
    "an empty length": head(b"content-length: ") + BODY + HIDDEN,
    "an unknown encoding": head(b"transfer-encoding: xchunked") + chunked(BODY) + HIDDEN,
    "chunked is not the last encoding": head(b"transfer-encoding: chunked, identity") + chunked(BODY) + HIDDEN,
    "a space before the colon": head(b"transfer-encoding : chunked") + chunked(BODY) + HIDDEN,
    "a vertical tab in the encoding": head(b"transfer-encoding: \x0bchunked") + chunked(BODY) + HIDDEN,
    "a folded header": head(b"x: 1", b" transfer-encoding: chunked", length()) + BODY + HIDDEN,
    "an indented first header": LINE + b"\r\n " + TE + b"\r\n\r\n" + chunked(BODY) + HIDDEN,
    "line feeds without carriage returns": head(length()).replace(b"\r\n", b"\n") + BODY + HIDDEN,
    "a carriage return without line feed": head(b"x: 1\r" + TE, length()) + BODY + HIDDEN,
    "a zero byte in a header": head(b"x: a\0b", length()) + BODY + HIDDEN,
    "a header without a name": head(b": chunked", length()) + BODY + HIDDEN,
    "a header without a colon": head(b"chunked", length()) + BODY + HIDDEN,
    "a chunk's size that is not a number": head(TE) + b"zz\r\n" + BODY + HIDDEN,
    "a chunk's size with a sign": head(TE) + b"-5\r\nhello\r\n0\r\n\r\n" + HIDDEN,
    "a chunk's size with 0x": head(TE) + b"0x5\r\nhello\r\n0\r\n\r\n" + HIDDEN,
    "a chunk's size of 40 digits": head(TE) + b"f" * 40 + b"\r\nhello\r\n0\r\n\r\n" + HIDDEN,
    "a chunk longer than it says": head(TE) + b"3\r\nhello\r\n0\r\n\r\n" + HIDDEN,
    "a chunk's line without a carriage return": head(TE) + b"5\nhello\r\n0\r\n\r\n" + HIDDEN,
    "an unknown HTTP version": head(length(), line=b"POST /v1/completions HTTP/1.7") + BODY + HIDDEN,
    "an HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HIDDEN,
    "a length in a trailer": head(TE) + chunked(BODY, end=b"0\r\ncontent-length: 3\r\n\r\n") + HIDDEN,
    "no method": head(length(), line=b"/v1/completions HTTP/1.1") + BODY + HIDDEN,
}
"""Each is followed by bytes that must not be parsed as a request."""


@pytest.mark.parametrize("sent", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
async def test_ambiguous_requests_are_rejected_and_the_rest_left_unread(sent: bytes):
    async with running() as up:
        response = await up.raw(sent)

        assert re.findall(rb"HTTP/1\.1 (\d{3}) ", response) == [b"400"]
        assert b"connection: close\r\n" in response
        assert up.worker.started == []
        assert not up.router.edge.upload_totals.bytes_held


UNUSUAL = {
    "an extension of a chunk": head(TE) + b"%x;name=value\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    "a trailer": head(TE) + chunked(BODY, end=b"0\r\nx-baton-mode: aggregated\r\nx: 1\r\n\r\n"),
    "spaces in a request line": head(length(), line=b"POST  /v1/completions  HTTP/1.1") + BODY,
    "an encoding in capitals": head(b"Transfer-Encoding: CHUNKED") + chunked(BODY),
    "leading zeros of a chunk's size": head(TE) + b"000%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    "empty lines before a request": b"\r\n\r\n" + head(length()) + BODY,
    "an offer to upgrade to HTTP/2": head(length(), b"connection: upgrade, http2-settings", b"upgrade: h2c") + BODY,
}


@pytest.mark.parametrize("sent", UNUSUAL.values(), ids=UNUSUAL.keys())
async def test_unusual_unambiguous_requests_are_served(sent: bytes):
    async with running() as up:
        response = await up.raw(sent + request(BODY, "connection: close"))

        assert re.findall(rb"HTTP/1\.1 (\d{3}) ", response) == [b"200", b"200"]
        assert [start.body for start in up.worker.started] == [BODY, BODY]


async def test_alternative_spellings_of_a_path_reach_no_worker():
    async with running() as up:
        for path in (f"http://elsewhere{COMPLETIONS}", "/v1/%63ompletions", f"/v1/..{COMPLETIONS}"):
            response = await up.raw(request(BODY, "connection: close", path=path))
            assert response.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 404 "))

        assert up.worker.started == []


NAMED = ["x-request-id", "x-baton-mode", "x-baton-class", "x-baton-tenant", "traceparent", "tracestate", "content-type"]


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(
    "value", [b"a\tb", b"a\xc2\x85x-injected: 1", b"a%0d%0ax-injected: 1", b"a\\r\\nx-injected: 1", b"\xff"]
)
async def test_request_headers_cannot_inject_response_headers(name: str, value: bytes):
    async with running() as up:
        sent = request(BODY, "connection: close", f"{name}: VALUE").replace(b"VALUE", value)

        response = await up.raw(sent)

        names = header_names(response)
        assert "x-injected" not in names
        assert len(names) == len(set(names))


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("end", [b"\r", b"\n", b"\0"])
async def test_control_characters_in_headers_are_rejected(name: str, end: bytes):
    async with running() as up:
        sent = request(BODY, f"{name}: VALUE").replace(b"VALUE", b"a" + end + b"x-injected: 1")

        response = await up.raw(sent)

        assert response.startswith(b"HTTP/1.1 400 ")
        assert up.worker.started == []


@pytest.mark.parametrize("field", ["model", "baton"])
async def test_body_text_cannot_inject_headers_or_leave_its_error_message(field: str):
    async with running() as up:
        evil = 'a\r\nx-injected: 1\r\n\r\n<script>"'
        body = prompt(**{field: evil if field == "model" else {evil: 1}})

        response = await up.raw(request(json.dumps(body).encode(), "connection: close"))

        status = int(response[9:12])
        assert 400 <= status < 500
        assert "x-injected" not in header_names(response)
        assert json.loads(response.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert b"x-content-type-options: nosniff\r\n" in response


async def test_a_worker_cannot_inject_response_headers():
    def evil(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(200, f"{JSON}\r\nx-injected: 1")
        frames.data(b"{}")
        frames.end(LegReport())

    async with running() as up:
        up.worker.script = evil

        response = await up.raw(request(BODY, "connection: close"))

        assert response.startswith(b"HTTP/1.1 200 ")
        assert "x-injected" not in header_names(response)


@pytest.mark.parametrize("text", ["text/event-stream; charset=utf-8", "w-1", ""])
def test_valid_header_values_stay_unchanged(text: str):
    assert header_value(text) == text.encode()


@pytest.mark.parametrize("text", ["a\r\nb", "a\nb", "a\0", "\x7f", "ä", "\udc80", "\u2028"])
def test_invalid_characters_are_removed_from_header_values(text: str):
    assert header_value(text).isalpha()


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/models", "/metrics", "/baton/decisions"])
async def test_cross_origin_pages_are_not_allowed(path: str):
    preflight = ("origin: https://elsewhere", "access-control-request-method: POST", "connection: close")
    async with running() as up:
        asked = await up.raw(request(b"", *preflight, path=path).replace(b"POST /", b"OPTIONS /"))
        answered = await up.raw(request(BODY, "origin: https://elsewhere", "connection: close"))

        assert asked.startswith(b"HTTP/1.1 403 ")
        assert answered.startswith(b"HTTP/1.1 403 ")
        assert b"access-control" not in (asked + answered).lower()
        assert b"x-content-type-options: nosniff\r\n" in asked
        assert b"x-content-type-options: nosniff\r\n" in answered


def header_names(response: bytes) -> list[str]:
    lines = response.partition(b"\r\n\r\n")[0].split(b"\r\n")[1:]
    return [line.partition(b":")[0].decode("latin-1").lower() for line in lines]


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/models"])
async def test_trailers_are_not_headers(path: str):
    trailed = head(TE, line=f"POST {path} HTTP/1.1".encode()) + chunked(BODY, end=b"0\r\nx-request-id: trailed\r\n\r\n")
    async with running() as up:
        response = await up.raw(trailed + request(BODY, "connection: close"))

        assert b"trailed" not in response
        assert not any(protocol.headers for protocol in up.connections())


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/models"])
@pytest.mark.parametrize("flood", [b"0\r\nx: " + b"y" * 64, b"0\r\n" + b"x: y\r\n" * 11, b"5;" + b"z" * 64])
async def test_chunk_overhead_and_trailers_are_bounded(path: str, flood: bytes):
    async with running() as up:
        reader, writer = await asyncio.open_connection("127.0.0.1", up.port)
        writer.write(head(TE, line=f"POST {path} HTTP/1.1".encode()) + flood[:3])
        with suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                while up.connections() or not reader.at_eof():
                    writer.write(flood[3:] * 1000)
                    await writer.drain()
                    await asyncio.sleep(0)
        writer.close()

        assert up.worker.started == []
