"""A hostile client cannot block the router, fill its memory or leave work behind."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress

import pytest

from shared.bus.frame_sender import LegFrames
from shared.contracts.inference import LegReport, StartLeg
from tests.unit.router.fake_worker import EVENTS, JSON, SSE, FakeWorker, serve_leg
from tests.unit.router.http.test_http_server import BODY, PATIENCE_S, Running, request, running, until
from tests.unit.router.world import COMPLETIONS, prompt

STREAMED = json.dumps(prompt(stream=True)).encode()
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\n".encode()


def stall(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
    frames.head(200, SSE)
    frames.data(EVENTS[0])


async def connected(up: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", up.port)


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        return await reader.read()


async def test_a_silent_client_is_disconnected():
    async with running(head_s_max=0.1) as up:
        assert await up.raw(b"") == b""


@pytest.mark.parametrize("sent", [HEAD, b"P", b"POST / HTTP/1.1\r\nx: y"])
async def test_an_incomplete_head_gets_408(sent):
    async with running(head_s_max=0.1) as up:
        assert (await up.raw(sent)).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("then", [b"\r\n", b"POST / HTT"])
async def test_stray_bytes_do_not_keep_an_idle_connection_open(then):
    async with running(head_s_max=0.1) as up:
        reader, writer = await connected(up)
        writer.write(request(BODY))
        await reader.readuntil(b"answer")
        writer.write(then)

        await read_to_end(reader)

        writer.close()


async def test_the_rest_of_a_rejected_body_does_not_keep_the_connection():
    async with running(head_s_max=0.1) as up:
        reader, writer = await connected(up)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\nabc")
        await reader.readuntil(b"healthy")
        writer.write(b"def")

        await read_to_end(reader)

        writer.close()


async def test_a_head_begun_during_a_stream_does_not_cut_it():
    async def slowly(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(200, SSE)
        for event in EVENTS:
            frames.data(event)
            await asyncio.sleep(0.15)
        frames.end(LegReport())

    async with running(head_s_max=0.1) as up:
        up.worker.script = slowly

        response = await up.raw(request(STREAMED) + HEAD)

        assert response.count(b"data: ") == len(EVENTS)


async def test_disconnecting_with_a_pipelined_request_cancels_the_first_leg():
    async with running() as up:
        up.worker.script = stall
        reader, writer = await connected(up)
        writer.write(request(STREAMED) + request(BODY))
        await reader.readuntil(EVENTS[0])
        writer.transport.abort()
        (frames,) = up.worker.frames.values()

        def found_out() -> bool:
            frames.data(EVENTS[0])  # The router reads nothing now: it notices the disconnect when it writes.
            return bool(up.worker.cancelled)

        await until(found_out)
        await until(lambda: not up.router.relay.in_flight)
        assert not up.router.edge.upload_totals.bytes_held


async def test_pipelined_requests_are_read_up_to_a_bound():
    waiting = asyncio.Event()

    async def one_by_one(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        if len(worker.started) > 50:
            await waiting.wait()
        serve_leg(worker, start, frames)

    async with running() as up:
        up.worker.script = one_by_one
        admit = up.router.edge.admit
        admitted = 0

        def counting(*args, **options):
            nonlocal admitted
            admitted += 1
            return admit(*args, **options)

        up.router.edge.admit = counting
        reader, writer = await connected(up)
        flood = asyncio.ensure_future(read_to_end(reader))
        one = request(BODY)
        writer.write(one * (8 * 1024 * 1024 // len(one)))
        await until(lambda: len(up.worker.started) > 50)

        assert admitted * len(one) < 2 * 1024 * 1024

        writer.transport.abort()
        with suppress(ConnectionResetError):
            await flood
        waiting.set()
        await until(lambda: not up.router.relay.in_flight)


@pytest.mark.parametrize("then", ["keep-alive", "close"])
async def test_a_client_that_leaves_its_response_unread_is_disconnected(then):
    def huge(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(200, JSON)
        for _ in range(32):
            frames.data(b"x" * 1024 * 1024)
        frames.end(LegReport())

    async with running(read_s_max=0.2, leg_buffer_bytes_max=1 << 30) as up:
        up.worker.script = huge
        with socket.create_connection(("127.0.0.1", up.port)) as client:
            client.sendall(request(BODY, f"connection: {then}"))
            await until(lambda: up.worker.started)
            await until(lambda: not up.router.relay.in_flight)

            await until(lambda: _is_reset(client))


def _is_reset(client: socket.socket) -> bool:
    try:
        client.sendall(b"\r\n")
    except OSError:
        return True
    return False


async def test_the_sum_of_bodies_is_bounded_and_freed_on_disconnect():
    async with running(bodies_bytes_max=200_000) as up:
        bodies = up.router.edge.upload_totals
        slow = [await connected(up) for _ in range(2)]
        for _reader, writer in slow:
            writer.write(request(b"x" * 110_000)[:-10])
        await until(lambda: bodies.bytes_held > 200_000 or slow[-1][0]._buffer)
        refused = await up.raw(request(BODY, "connection: close"))

        for _reader, writer in slow:
            writer.transport.abort()
        await until(lambda: not bodies.bytes_held)

        assert b"503 Service Unavailable" in refused + bytes(slow[0][0]._buffer) + bytes(slow[1][0]._buffer)
        assert (await up.raw(request(BODY, "connection: close"))).startswith(b"HTTP/1.1 200 ")
        assert not bodies.bytes_held


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_an_upgrade_offer_is_ignored_and_the_body_read(version):
    offer = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA")
    async with running() as up:
        reader, writer = await connected(up)
        writer.write(request(BODY, *offer, "x-request-id: mine", version=version))
        async with asyncio.timeout(PATIENCE_S):
            response = await reader.readuntil(b"answer")
        writer.close()

        assert response.startswith(b"HTTP/1.1 200 ")
        assert b"x-request-id: mine" in response
        assert up.worker.started[0].body == BODY


async def test_an_upgrade_offer_with_a_chunked_body_is_ignored():
    async with running() as up:
        reader, writer = await connected(up)
        head = HEAD + b"connection: upgrade, close\r\nupgrade: websocket\r\ntransfer-encoding: chunked\r\n\r\n"
        for at in range(len(head)):
            writer.write(head[at : at + 1])
            await writer.drain()
        for part in (BODY[:9], BODY[9:], b""):
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
        response = await read_to_end(reader)
        writer.close()

        assert response.startswith(b"HTTP/1.1 200 ")
        assert up.worker.started[0].body == BODY


async def test_connect_requests_are_rejected():
    async with running() as up:
        assert (await up.raw(b"CONNECT db:5432 HTTP/1.1\r\nhost: db\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


async def test_many_upgrade_offers_do_not_overflow_the_stack():
    async with running() as up:
        reader, writer = await connected(up)
        writer.write(request(BODY, "connection: upgrade", "upgrade: h2c") * 3000)
        with suppress(ConnectionResetError):  # It closes while there is more to read.
            await read_to_end(reader)
        writer.close()

        assert (await up.raw(request(BODY, "connection: close"))).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("header", ["traceparent", "tracestate", "content-type", "x-request-id"])
async def test_unusual_bytes_in_headers_are_harmless(header):
    async with running() as up:
        strange = request(BODY, "connection: close", f"{header}: STRANGE").replace(b"STRANGE", b"\xff\x80 \xc3\xa9")

        status = 415 if header == "content-type" else 200
        assert (await up.raw(strange)).startswith(b"HTTP/1.1 %d " % status)
        assert (await up.raw(request(BODY, "connection: close"))).startswith(b"HTTP/1.1 200 ")


async def test_an_invalid_trace_context_is_not_forwarded():
    good = f"traceparent: 00-{'a' * 32}-{'b' * 16}-01"
    async with running() as up:
        await up.raw(request(BODY, "connection: close", good, "tracestate: vendor=1"))
        await up.raw(request(BODY, "connection: close", "traceparent: " + "x" * 30_000))
        await up.raw(request(BODY, "connection: close", good, "tracestate: " + "y" * 30_000))

        carried = [sorted(headers) for headers in up.worker.headers]
        assert carried == [["traceparent", "tracestate"], [], ["traceparent"]]
