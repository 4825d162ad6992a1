"""The event stream sends changes to its clients, and drops clients that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
from contextlib import asynccontextmanager

import pytest

from services.collector.console.feed import CLIENT_FRAMES_MAX, KEEP_ALIVE_S, UPDATE_S_MIN, Feed, WatcherLimits
from services.collector.console.views import Health, Page
from shared.contracts.channels import WORKER_LOST
from shared.contracts.workers import WorkerLost
from tests.support.virtual_time import LoopClock, in_virtual_time
from tests.unit.collector.console_world import TWO, finished, serving, world

NOTHING = Page(
    at=0.0,
    default_mode="auto",
    model_names=[],
    health=Health(status="healthy", sentences=[]),
    workers=[],
    flows=[],
    requests=[],
    events=[],
    tenants=[],
    models=[],
)
WAIT_S_MAX = 60.0
EVENTS = b"GET /console/events HTTP/1.1\r\nhost: x\r\n\r\n"


class Browser:
    """Reads the app's event stream as ASGI gives it."""

    def __init__(self, app):
        self._app = app
        self._sent: asyncio.Queue = asyncio.Queue()
        self._left = asyncio.Event()
        self._text = ""
        self.status = 0
        self.headers = {}
        self.over = False

    @asynccontextmanager
    async def looking(self):
        scope = {
            "type": "http", "method": "GET", "path": "/console/events", "raw_path": b"/console/events", "headers": [],
            "query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2),
            "root_path": "", "asgi": {"version": "3.0"},
        }  # fmt: skip
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._app(scope, self._receive, self._sent.put))
            yield self
            self._left.set()

    async def _receive(self):
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _piece(self):
        message = await self._sent.get()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self._text += message["body"].decode()
            self.over = not message.get("more_body", False)

    async def event(self):
        """Name and data of the next event; a comment has the name ``comment``."""
        while "\n\n" not in self._text:
            await self._piece()
        block, _, self._text = self._text.partition("\n\n")
        if block.startswith(":"):
            return "comment", None
        name, data = block.split("\n")
        return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))

    async def until(self, name):
        while True:
            found, data = await self.event()
            if found == name:
                return data

    async def end(self):
        while not self.over:
            await self._piece()


@asynccontextmanager
async def watched_world():
    async with world(LoopClock()) as one:
        following = asyncio.get_running_loop().create_task(one.collector.feed.follow())
        yield one
        following.cancel()


@in_virtual_time
async def test_the_stream_starts_with_the_page_and_continues_with_changes():
    async with watched_world() as one, Browser(one.app).looking() as browser:
        await one.be_healthy()
        state = await browser.until("state")
        assert browser.headers["content-type"] == "text/event-stream"
        assert state["orders_allowed"] is True
        assert state["requests"] == []

        await one.finish(finished(request_id="the-one"))
        assert (await browser.until("request"))["id"] == "the-one"
        await one.tell(WORKER_LOST, WorkerLost(worker_id="d1", epoch=1, silent_s=3.0))
        assert (await browser.until("event"))["text"] == "lost: no report for 3.0 s"


@in_virtual_time
async def test_updates_are_batched_to_at_most_two_per_second():
    async with watched_world() as one, Browser(one.app).looking() as browser:
        now = asyncio.get_running_loop().time
        await browser.until("state")
        begun = now()
        for number in range(20):
            await one.finish(finished(request_id=f"r{number}"))
            await asyncio.sleep(0.1)
        rows = [(await browser.until("request"), now()) for _ in range(20)]

        assert [row["id"] for row, _at in rows] == [f"r{number}" for number in range(20)]
        updates = {at for _row, at in rows}
        assert len(updates) <= (now() - begun) / UPDATE_S_MIN + 1


@in_virtual_time
async def test_a_quiet_stream_sends_keep_alives_and_falling_rates():
    async with watched_world() as one, Browser(one.app).looking() as browser:
        await one.finish(finished())
        assert (await browser.until("flows"))[0]["per_s"] > 0
        while await browser.until("flows"):
            pass
        begun = asyncio.get_running_loop().time()
        await browser.until("comment")
        assert asyncio.get_running_loop().time() - begun <= 60 + KEEP_ALIVE_S + 1


@in_virtual_time
async def test_clients_beyond_the_maximum_get_503_until_one_leaves():
    async with watched_world() as one, Browser(one.app).looking() as first:
        async with Browser(one.app).looking() as second, Browser(one.app).looking() as third:
            await first.until("state")
            await second.until("state")
            await third.end()
            assert (third.status, third.headers["retry-after"]) == (503, "10")
        async with Browser(one.app).looking() as fourth:
            await fourth.until("state")
            assert fourth.status == 200


@in_virtual_time
async def test_streams_end_when_the_process_stops():
    async with watched_world() as one, Browser(one.app).looking() as browser:
        await browser.until("state")
        one.collector.feed.close()
        await browser.end()
        assert one.collector.feed.join("-", operator=True) is None


async def test_only_a_client_that_does_not_read_is_dropped():
    feed = Feed(lambda: NOTHING, {}, TWO)
    slow = feed.join("a", operator=False)
    for _ in range(CLIENT_FRAMES_MAX):
        assert slow.send(b"x")

    quick = feed.join("a", operator=False)
    slow.is_new = True
    feed.update()

    assert len(feed) == 1
    assert await slow.next() is None
    assert (await quick.next()).startswith(b"event: state\n")


async def test_without_clients_no_page_is_computed():
    pages = []
    feed = Feed(lambda: pages.append(1) or NOTHING, {}, TWO)
    following = asyncio.get_running_loop().create_task(feed.follow())
    for _ in range(5):
        feed.wake()
        await asyncio.sleep(0)
    assert pages == []
    following.cancel()


def test_operators_have_places_that_no_other_client_takes():
    feed = Feed(lambda: NOTHING, {}, WatcherLimits(total=4, for_operators=1, per_address=2))

    taken = [feed.join("10.0.0.1", operator=False) for _ in range(3)]
    assert [watcher is not None for watcher in taken] == [True, True, False]
    assert feed.join("10.0.0.2", operator=False) is not None
    assert feed.join("10.0.0.3", operator=False) is None
    assert feed.join("10.0.0.1", operator=True) is not None
    assert feed.join("10.0.0.1", operator=True) is None
    feed.leave(taken[0])
    assert feed.join("10.0.0.1", operator=True) is not None


async def read_to_end(reader):
    with contextlib.suppress(ConnectionResetError):
        while await reader.read(65536):
            pass


async def test_clients_that_send_too_slowly_are_dropped_and_a_stream_is_not():
    async with world() as one, serving(one, head_s_max=0.2) as (_server, port), asyncio.timeout(WAIT_S_MAX):
        prompt_reader, prompt_writer = await asyncio.open_connection("127.0.0.1", port)
        prompt_writer.write(b"GET /console/events HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await prompt_reader.readline() == b"HTTP/1.1 200 OK\r\n"
        for sent in (b"", b"GET /health HT"):
            slow_reader, slow_writer = await asyncio.open_connection("127.0.0.1", port)
            slow_writer.write(sent)
            await read_to_end(slow_reader)
        one.collector.feed.update()
        assert await prompt_reader.readuntil(b"event: state")
        prompt_writer.close()


async def test_the_rest_of_a_body_that_nobody_needs_does_not_keep_a_connection():
    async with world() as one, serving(one, head_s_max=0.2) as (_server, port), asyncio.timeout(WAIT_S_MAX):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\na")
        await reader.readuntil(b"healthy")
        writer.write(b"b")

        await read_to_end(reader)

        writer.close()


@pytest.mark.parametrize("at_once", [True, False], ids=["in the same packet", "later"])
async def test_a_viewer_that_pipelined_a_request_gives_its_place_back_when_it_leaves(at_once):
    second = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    async with world() as one, serving(one) as (server, port), asyncio.timeout(WAIT_S_MAX):
        feed = one.collector.feed
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(EVENTS + second if at_once else EVENTS)
        await reader.readuntil(b"\r\n\r\n")
        (watcher,) = feed._watchers
        if not at_once:
            writer.write(second)
        (connection,) = server.server_state.connections
        while not connection.pipeline:
            await asyncio.sleep(0.01)

        writer.transport.abort()
        while server.server_state.connections:  # Reading is paused: only a write shows that the client has left.
            watcher.send(b": \n\n")
            await asyncio.sleep(0.01)

        while len(feed):
            await asyncio.sleep(0.01)


def connection(port, source):
    return socket.create_connection(("127.0.0.1", port), source_address=(source, 0), timeout=WAIT_S_MAX)


async def test_idle_connections_and_viewers_lock_no_operator_out(tmp_path):
    file = tmp_path / "keys"
    entry = '[[key]]\nsha256 = "{}"\npermissions = ["{}"]\n'
    digests = [hashlib.sha256(key).hexdigest() for key in (b"viewer", b"the key")]
    file.write_text(entry.format(digests[0], "view") + entry.format(digests[1], "admin"))
    viewer = EVENTS[:-2] + b"authorization: Bearer viewer\r\n\r\n"
    limits = WatcherLimits(total=4, for_operators=2, per_address=4)
    async with (
        world(host="0.0.0.0", key_file=str(file), watchers=limits) as one,
        serving(one, host="0.0.0.0", connections_max=20, connections_per_address_max=10) as (server, port),
        contextlib.AsyncExitStack() as held,
        asyncio.timeout(WAIT_S_MAX),
    ):
        for number in range(20):
            client = held.enter_context(connection(port, f"127.0.0.{2 + number % 2}"))
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nx" if number > 4 else viewer)
        while len(server.server_state.connections) < 20 or len(one.collector.feed) < 2:
            await asyncio.sleep(0.01)

        operator = held.enter_context(connection(port, "127.0.0.4"))
        operator.sendall(EVENTS[:-2] + b"authorization: Bearer the key\r\n\r\n")
        answer = await asyncio.to_thread(operator.recv, 15)

        assert answer == b"HTTP/1.1 200 OK"
        assert len(server.server_state.connections) <= 20


async def test_a_client_that_does_not_read_is_dropped_with_its_unread_data():
    async with world() as one, serving(one, read_s_max=0.2) as (server, port), asyncio.timeout(WAIT_S_MAX):
        client = socket.create_connection(("127.0.0.1", port))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(EVENTS)
        feed = one.collector.feed
        while not len(feed):
            await asyncio.sleep(0.01)
        (watcher,) = feed._watchers
        while watcher.send(b"x" * 1_000_000):
            await asyncio.sleep(0)
        while len(feed):  # The response ends because its connection is gone.
            await asyncio.sleep(0.01)
        assert not server.server_state.connections
        client.close()
