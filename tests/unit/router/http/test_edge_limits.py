"""Limits on what clients can hold: connections, headers and unread responses."""

from __future__ import annotations

import asyncio
import resource
import socket

import pytest

from shared.bus.frame_sender import LegFrames
from shared.contracts.inference import LegReport, StartLeg
from shared.http.limits import OTHER_FILES, Connections, allow_open_files, owner_of
from shared.http.protocol import HEADERS_MAX
from shared.telemetry import names
from tests.unit.router.fake_worker import JSON, SSE, FakeWorker
from tests.unit.router.http.test_hostile_clients import STREAMED, connected, read_to_end
from tests.unit.router.http.test_http_server import BODY, request, running, until

PIECE = b"data: " + b"x" * 65536 + b"\n\n"


async def for_ever(_worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
    frames.head(200, SSE)
    while not frames.ended:
        frames.data(PIECE)
        await asyncio.sleep(0.001)


class Late(asyncio.Event):
    """A script that responds when its test says so."""

    async def __call__(self, _worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        await self.wait()
        frames.head(200, JSON)
        frames.data(b"the answer")
        frames.end(LegReport())


def refusals(up, reason: str) -> float:
    return up.router.registry.get_sample_value(names.ROUTER_REFUSALS.name, {"reason": reason}) or 0.0


def idle_socket(port: int) -> socket.socket:
    """A client socket with a small receive buffer."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    return client


async def test_a_client_that_stops_reading_is_disconnected_and_its_leg_cancelled():
    async with running(read_s_max=0.1, leg_buffer_bytes_max=1 << 30) as up:
        up.worker.script = for_ever
        with idle_socket(up.port) as client:
            client.sendall(request(STREAMED))

            await until(lambda: up.worker.cancelled)

            await until(lambda: not up.router.relay.in_flight and not up.router.edge.connections.count)
        assert refusals(up, "client_slow") == 1


async def test_unread_bytes_of_a_client_are_bounded_before_its_timeout():
    buffer_bytes_max = 20 * len(PIECE)
    async with running(read_s_max=3600.0, leg_buffer_bytes_max=buffer_bytes_max) as up:
        up.worker.script = for_ever
        with idle_socket(up.port) as client:
            client.sendall(request(STREAMED))

            await until(lambda: up.worker.cancelled)

            (protocol,) = up.connections()
            assert protocol.unsent_bytes() <= buffer_bytes_max + 4 * len(PIECE)
        await until(lambda: not up.router.relay.in_flight)


async def test_unread_responses_hold_back_only_their_connection():
    def large(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(200, JSON)
        frames.data(b"x" * 1024 * 1024)
        frames.end(LegReport())

    async with running(read_s_max=3600.0) as up:
        up.worker.script = large
        with idle_socket(up.port) as client:
            client.sendall(request(BODY) * 8)

            await until(lambda: any(protocol.held for protocol in up.connections()))
            served = len(up.worker.started)
            assert (await up.raw(request(BODY, "connection: close"))).startswith(b"HTTP/1.1 200 ")

            assert len(up.worker.started) == served + 1 < 8
            reader, writer = await asyncio.open_connection(sock=client.dup())
            for _ in range(8):
                assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
                head = await reader.readuntil(b"\r\n\r\n")
                assert b"content-length: 1048576\r\n" in head
                await reader.readexactly(1024 * 1024)
            writer.close()


@pytest.mark.parametrize(
    ("limits", "served"),
    [({"connections_max": 2}, 2), ({"connections_per_address_max": 3}, 3), ({"connections_max": 0}, 5)],
)
async def test_connections_are_limited_in_total_and_per_address(limits: dict[str, int], served: int):
    async with running(**{"connections_per_address_max": 0, **limits}) as up:
        clients = [await connected(up) for _ in range(served)]
        await until(lambda: up.router.edge.connections.count == served)
        if served < 5:
            assert (await up.raw(b"")).startswith(b"HTTP/1.1 503 ")
            assert refusals(up, "too_many_connections") == 1

        for _reader, writer in clients:
            writer.close()
        await until(lambda: up.router.edge.connections.count == 0)
        assert (await up.raw(request(BODY, "connection: close"))).startswith(b"HTTP/1.1 200 ")


async def test_too_many_headers_get_431():
    async with running() as up:
        fields = [f"x-{number}: 1" for number in range(HEADERS_MAX)]
        few = await up.raw(request(BODY, *fields[: HEADERS_MAX - 3], "connection: close"))
        many = await up.raw(request(BODY, *fields))

        assert few.startswith(b"HTTP/1.1 200 ")
        assert many.startswith(b"HTTP/1.1 431 ")


GARBAGE = [
    (b"\0\1 garbage\r\n\r\n", b"", b"HTTP/1.1 400 "),
    (b"GET / HTTP/1.1\r\nx: ", b"y" * 40_000, b"HTTP/1.1 431 "),
]


@pytest.mark.parametrize(("garbage", "more", "refused"), GARBAGE, ids=["not HTTP", "endless"])
async def test_garbage_after_a_request_is_rejected_after_its_response(garbage: bytes, more: bytes, refused: bytes):
    async with running() as up:
        go = up.worker.script = Late()
        reader, writer = await connected(up)
        writer.write(request(BODY) + garbage)
        await until(lambda: up.worker.started)
        (protocol,) = up.connections()
        while not protocol.last_text:
            before = protocol.request_bytes
            writer.write(more)
            await until(lambda: protocol.request_bytes > before or protocol.last_text)  # noqa: B023
        go.set()
        response = await read_to_end(reader)
        writer.close()

        first, _, second = response.partition(b"the answer")
        assert first.startswith(b"HTTP/1.1 200 ")
        assert second.startswith(refused)


async def test_an_invalid_pipelined_body_is_rejected_after_the_running_stream():
    async with running() as up:
        go = up.worker.script = Late()
        reader, writer = await connected(up)
        writer.write(request(BODY) + b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n")
        await until(lambda: any(protocol.last_text is not None for protocol in up.connections()))
        go.set()
        response = await read_to_end(reader)
        writer.close()

        assert response.count(b"HTTP/1.1 ") == 2
        assert b"HTTP/1.1 400 " in response.partition(b"the answer")[2]
        assert len(up.worker.started) == 1


def test_all_addresses_of_an_ipv6_client_share_one_limit():
    connections = Connections(0, 1)

    assert connections.enter("2001:db8::1")
    assert not connections.enter("2001:db8::ffff")
    assert connections.enter("2001:db8:0:1::1")
    connections.leave("2001:db8::1")
    assert connections.enter("2001:db8::ffff")


@pytest.mark.parametrize(
    ("address", "owner"),
    [("10.0.0.1", "10.0.0.1"), ("::ffff:10.0.0.1", "10.0.0.1"), ("fe80::1%eth0", "fe80::"), ("-", "-"), ("", "")],
)
def test_addresses_map_to_their_owner(address: str, owner: str):
    assert owner_of(address) == owner


def test_the_file_limit_covers_the_maximum_of_connections():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OTHER_FILES, before[1]))
        allow_open_files(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (OTHER_FILES + 100, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
