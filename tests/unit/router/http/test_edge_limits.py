"""Limits on what clients can hold: connections, headers and unread responses."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.bus.frame_sender import LegFrames
from shared.contracts.api_keys import digest_of
from shared.contracts.inference import LegReport, StartLeg
from shared.http.limits import OTHER_FILES, QUIET_S, Connections, Descriptors, allow_open_files, owner_of
from shared.http.protocol import HEADERS_MAX
from shared.telemetry import names
from tests.support.examples import examples
from tests.unit.router.fake_worker import JSON, SSE, FakeWorker
from tests.unit.router.http.test_hostile_clients import STREAMED, connected, read_to_end
from tests.unit.router.http.test_http_server import BODY, PATIENCE_S, Running, request, running, until

KEYS = f'salt = "{"0" * 64}"\n[[key]]\ntenant = "acme"\nsha256 = "{digest_of(b"k")}"\n'
BEARER = "authorization: Bearer k"
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
        go = up.worker.script = Late()
        clients = [await connected(up) for _ in range(served)]
        for _reader, writer in clients:
            writer.write(request(BODY))
        await until(lambda: len(up.worker.started) == served)
        if served < 5:
            assert (await up.raw(b"")).startswith(b"HTTP/1.1 503 ")
            assert refusals(up, "too_many_connections") == 1

        go.set()
        for reader, writer in clients:
            await reader.readuntil(b"the answer")
            writer.close()
        await until(lambda: up.router.edge.connections.count == 0)
        assert (await up.raw(request(BODY, "connection: close"))).startswith(b"HTTP/1.1 200 ")


IDLE = b""
IN_HEAD = b"POST /v1/completions HTTP/1.1\r\nx: "
IN_BODY = b"POST /v1/completions HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"
UNNEEDED = b"GET /health HTTP/1.1\r\ncontent-length: 9\r\n\r\nx"


def from_address(up: Running, source: str, sent: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", up.port), source_address=(source, 0), timeout=PATIENCE_S)
    client.sendall(sent)
    return client


@pytest.mark.parametrize(
    "sent", [IDLE, IN_HEAD, IN_BODY, UNNEEDED], ids=["idle", "in head", "in body", "unneeded body"]
)
async def test_two_addresses_that_hold_all_connections_keep_no_other_out(sent: bytes):
    async with running(connections_max=20, connections_per_address_max=10) as up, contextlib.AsyncExitStack() as held:
        count = up.router.edge.connections
        for number in range(20):
            held.enter_context(from_address(up, f"127.0.0.{2 + number % 2}", sent))
        await until(lambda: count.count == 20)

        other = held.enter_context(from_address(up, "127.0.0.4", request(BODY)))
        assert (await asyncio.to_thread(other.recv, 15)) == b"HTTP/1.1 200 OK"
        same = held.enter_context(from_address(up, "127.0.0.2", request(BODY)))
        assert (await asyncio.to_thread(same.recv, 15)) == b"HTTP/1.1 200 OK"

        assert count.count <= 20
        assert refusals(up, "connection_displaced") == 2


async def test_connections_that_brought_a_key_make_room_last():
    async with (
        running(connections_max=8, connections_per_address_max=0, keys=KEYS) as up,
        contextlib.AsyncExitStack() as held,
    ):
        own = [held.enter_context(from_address(up, "127.0.0.2", request(BODY, BEARER))) for _ in range(6)]
        for client in own:
            assert (await asyncio.to_thread(client.recv, 15)) == b"HTTP/1.1 200 OK"
        strangers = [held.enter_context(from_address(up, "127.0.0.3", request(BODY))) for _ in range(20)]

        for client in strangers:
            with contextlib.suppress(ConnectionResetError):  # Another stranger has its place.
                await asyncio.to_thread(client.recv, 15)

        assert sum(protocol.client[0] == "127.0.0.2" for protocol in up.connections()) == 6


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


class Waiting:
    """A connection that waits for its client, or serves a request."""

    def __init__(self, *, waits: bool = True) -> None:
        self.waits_for_client = waits
        self.dropped = False

    def make_room(self) -> None:
        self.dropped = True


def test_all_addresses_of_an_ipv6_client_share_one_limit():
    connections = Connections(0, 1)
    first = Waiting(waits=False)

    assert connections.enter(first, "2001:db8::1")
    assert not connections.enter(Waiting(), "2001:db8::ffff")
    assert connections.enter(Waiting(), "2001:db8:0:1::1")
    connections.leave(first)
    assert connections.enter(Waiting(), "2001:db8::ffff")


def test_connections_without_descriptors_are_counted_and_logged_once_for_each_lack(caplog):
    now = 0.0
    descriptors = Descriptors(100, lambda: now)
    assert not descriptors.lack(93, 80)

    for descriptor in (94, 20, 95):  # The second one has the number of a connection that made room.
        assert descriptors.lack(descriptor, 81)
        now += QUIET_S / 2
    assert not descriptors.lack(20, 80)
    assert (descriptors.lacking, len(caplog.messages)) == (3, 1)
    assert "almost all of this process's 100 file descriptors" in caplog.text

    now += QUIET_S
    assert not descriptors.lack(20, 81)
    assert descriptors.lack(99, 81)
    assert len(caplog.messages) == 2
    assert not Descriptors(-1, lambda: now).lack(10**6, 81)


def test_without_descriptors_an_idle_connection_makes_room_and_a_busy_one_does_not():
    connections = Connections(0, 0)
    idle, busy = Waiting(), Waiting(waits=False)
    connections.enter(idle, "10.0.0.1")
    connections.enter(busy, "10.0.0.2")

    assert connections.enter(Waiting(waits=False), "10.0.0.3", is_full=True)
    assert (idle.dropped, busy.dropped) == (True, False)
    assert not connections.enter(Waiting(), "10.0.0.4", is_full=True)


@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=40),
    count_max=st.integers(0, 8),
    per_address_max=st.integers(0, 4),
)
@settings(max_examples=examples(50), deadline=None)
def test_the_limits_hold_and_an_owner_with_fewer_gets_a_place_that_waits(
    steps: list[tuple[int, bool, bool]], count_max: int, per_address_max: int
):
    connections, opened = Connections(count_max, per_address_max), []
    for number, waits, leaves in steps:
        if leaves and opened:
            connections.leave(opened.pop(number % len(opened))[0])
            continue
        client, owner = Waiting(waits=waits), f"10.0.0.{number}"
        before = [(one, name) for one, name in opened if not one.dropped]
        own = sum(name == owner for _one, name in before)
        entered = connections.enter(client, owner)

        opened = [(one, name) for one, name in [*before, *([(client, owner)] if entered else [])] if not one.dropped]
        assert connections.count == len(opened)
        assert not count_max or len(opened) <= count_max
        assert not per_address_max or sum(name == owner for _one, name in opened) <= per_address_max
        more = [one for one, name in before if one.waits_for_client and sum(each == name for _, each in before) >= own]
        own_full = 0 < per_address_max <= own
        assert entered or own_full or not more
        assert all(not one.dropped or one.waits_for_client for one, _name in before)


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
