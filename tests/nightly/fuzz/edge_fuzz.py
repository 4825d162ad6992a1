"""So many connections of clients that send nearly HTTP, to the router and to the metrics collector, through the real
protocol, edges, relay and applications.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httptools
import msgspec

from services.collector.app import LIMITS, CollectorEdge
from services.collector.console.feed import WatcherLimits
from services.router.settings import Settings
from shared.bus.frame_sender import LegFrames
from shared.contracts.inference import LegReport, StartLeg
from shared.http.edge import HttpEdge
from shared.http.origin import AllowedPages
from shared.http.protocol import EdgeProtocol
from shared.http.server import make_server
from tests.nightly.fuzz.bus_fuzz import Campaign, Progress
from tests.nightly.fuzz.watch import OBJECTS_GROWN_MAX, Watch, memory_bytes, objects
from tests.support.virtual_time import LoopClock, run_in_virtual_time
from tests.unit.collector.console_world import LOOPBACK, world
from tests.unit.router.fake_worker import DONE, EVENTS, JSON, SSE, WHOLE_RESPONSE, FakeWorker
from tests.unit.router.world import open_world

BATCH = 25
PAUSE_S = 0.2
SETTLE_S = 300.0
"""Beyond all deadlines of clients."""
PIECES_MAX = 4
CHANGES_MAX = 4
PIPELINED_MAX = 3
NOT_READ_SHARE = 0.1
FILES_BYTES_MAX = 10
"""Full with the first upload, so that what is kept does not grow."""
INJECTED = b"x-injected"
ENDLESS = b"x-accel-buffering"
"""In the head of a stream that ends only when its client leaves."""

LINES = (
    b"host: x",
    b"host: localhost",
    b"connection: close",
    b"connection: keep-alive",
    b"connection: upgrade\r\nupgrade: h2c",
    b"expect: 100-continue",
    b"x-request-id: mine",
    b"x-baton-mode: aggregated",
    b"x-baton-tenant: t",
    b"authorization: Bearer secret",
    b"traceparent: 00-%b-%b-01" % (b"a" * 32, b"b" * 16),
    b"origin: https://elsewhere",
    b"content-type: application/json",
    b"content-type: multipart/form-data; boundary=x",
)
INSERTED = (
    b"\r\n",
    b"\n",
    b"\r",
    b"\r\n\r\n",
    b"\0",
    b" ",
    b":",
    b"\xff",
    b"%0d%0ax-injected: 1",
    b"\r\nx-injected: 1",
    b"content-length: 5\r\n",
    b"transfer-encoding: chunked\r\n",
    b"0\r\n\r\n",
    b"ffffffffffffffffff\r\n",
    b";a=b",
    b"HTTP/1.0",
    b"a" * 70_000,
    b"a: b\r\n" * 300,
)


@dataclass(frozen=True)
class Asked:
    """What clients ask of one edge."""

    gets: tuple[bytes, ...]
    posts: tuple[bytes, ...]
    bodies: tuple[bytes, ...]


OF_ROUTER = Asked(
    gets=(
        b"/v1/models",
        b"/baton/decisions",
        b"/baton/decisions/latest",
        b"/v1/decisions/latest",
        b"/tokenizer_info?model=m",
        b"/healthcheck",
        b"/v1/responses/resp_1",
        b"/v1/responses/resp_1/input_items?limit=1&order=asc&after=x",
        b"/v1/files?limit=1",
        b"/v1/files/file_1/content",
        b"/v1/batches?after=batch_1",
        b"/v1/batches/batch_1",
        b"/metrics",
        b"/health",
        b"/openapi.json",
        b"/%2e",
        b"*",
    ),
    posts=(
        *(b"/v1/completions", b"/v1/chat/completions", b"/v1/embeddings", b"/v1/models", b"/metrics", b"/ready"),
        *(b"/invocations", b"/v2/embed", b"/v2/rerank", b"/v1/audio/transcriptions", b"/v1/load_lora_adapter"),
        *(b"/v1/chat/completions/batch", b"/generative_scoring"),
        *(b"/v1/messages", b"/v1/messages/count_tokens", b"/v1/responses", b"/v1/responses/resp_1/cancel"),
        *(b"/v1/files", b"/v1/batches", b"/v1/batches/batch_1/cancel"),
    ),
    bodies=(
        b'{"model":"m","prompt":"hello","max_tokens":3}',
        b'{"model":"m","prompt":"hello","stream":true}',
        b'{"model":"m","messages":[{"role":"user","content":"hello"}],"baton":{"mode":"aggregated","ttft_s":1}}',
        b'{"model":"nobody"}',
        b'{"lora_name":"sql","lora_path":"sql-v1"}',
        b'{"model":"m","max_tokens":3,"messages":[{"role":"user","content":"hello"}],"stream":true}',
        b'{"model":"m","input":"hello","store":true,"previous_response_id":"resp_1"}',
        b'{"model":"m","input":"hello","background":true}',
        b'{"input_file_id":"file_1","endpoint":"/v1/completions","completion_window":"24h"}',
        b"[",
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n--x--\r\n',
        (
            b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n--x--\r\n'
        ),
    ),
)
OF_COLLECTOR = Asked(
    gets=(
        b"/console/events",
        b"/console/events",
        b"/console",
        b"/console/files/console.js",
        b"/console/files/%2e%2e",
        b"/console/requests/router-1-ab-d7",
        b"/metrics",
        b"/health",
        b"/",
    ),
    posts=(b"/console/orders", b"/console/orders", b"/console/events"),
    bodies=(
        b'{"action":"drain","worker_id":"w1","deadline_s":1}',
        b'{"action":"role","worker_id":"w1","role":"decode"}',
        b'{"action":"mode","mode":"auto"}',
        b'{"action":"mode","mode":1}',
        b"[",
    ),
)


@dataclass(frozen=True)
class Target:
    """One edge, and what it holds besides connections and uploads."""

    edge: HttpEdge[Any]
    held: Callable[[], dict[str, int]]


class AtOnce(ThreadPoolExecutor):
    """Runs what is submitted in the loop's thread: virtual time would outrun another one."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


class Client(asyncio.Transport):
    """The other end of a connection, without a socket."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.written = bytearray()
        self.protocol: Any = None
        self._reads = reads
        self._closing = False
        self._lost = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        if self._closing:
            return
        self.written += data
        if not self._reads:
            self.protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return 0 if self._reads else len(self.written)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        """It is asked for less than it may be sent: whatever comes must be borne."""

    def resume_reading(self) -> None:
        """See above."""

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self.lose)

    abort = close

    def lose(self) -> None:
        """The connection is gone, once."""
        self._closing = True
        if not self._lost:
            self._lost = True
            self.protocol.connection_lost(None)


class Answers:
    """Reads what a client was answered as a client does."""

    def __init__(self) -> None:
        self.names: list[bytes] = []

    def on_header(self, name: bytes, _value: bytes) -> None:
        self.names.append(name.lower())

    def fault(self, written: bytes) -> str:
        """Why that is no answer; empty when it is one, or the beginning of one."""
        try:
            httptools.HttpResponseParser(self).feed_data(written)
        except httptools.HttpParserUpgrade:
            return "an upgrade"
        except httptools.HttpParserError as error:
            return f"{error}: {written[:400]!r}"
        return "an injected header" if INJECTED in self.names else ""


def answer(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
    """Whatever the body is."""
    streams = b'"stream":true' in start.body
    frames.head(200, SSE if streams else JSON)
    for data in (*EVENTS, DONE) if streams else (WHOLE_RESPONSE,):
        frames.data(data, [1])
    frames.end(LegReport(prompt_tokens=9, completion_tokens=3))
    del worker.started[:], worker.headers[:], worker.cancelled[:]
    worker.frames.clear()


class Requests:
    """What clients send; the same for the same seed."""

    def __init__(self, seed: int, asked: Asked) -> None:
        self.random = random.Random(f"edge {seed}")
        self._asked = asked

    def sent(self) -> list[bytes]:
        """One connection's bytes, in pieces."""
        whole = b"".join(self._request() for _ in range(self.random.randint(1, PIPELINED_MAX)))
        for _ in range(self.random.randint(0, CHANGES_MAX)):
            whole = self._changed(whole)
        cuts = sorted(self.random.randrange(len(whole) + 1) for _ in range(self.random.randrange(PIECES_MAX)))
        return [whole[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]

    def _request(self) -> bytes:
        lines = self.random.sample(LINES, self.random.randint(0, 4))
        version = self.random.choice((b"1.1", b"1.1", b"1.0"))
        if self.random.random() < 0.25:
            head = [b"GET %b HTTP/%b" % (self.random.choice(self._asked.gets), version), *lines]
            return b"\r\n".join([*head, b"", b""])
        body = self.random.choice(self._asked.bodies)
        head = [b"POST %b HTTP/%b" % (self.random.choice(self._asked.posts), version), *lines]
        if self.random.random() < 0.3:
            middle = self.random.randrange(1, len(body) + 1)
            parts = (body[:middle], body[middle:], b"") if middle < len(body) else (body, b"")
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
            return b"\r\n".join([*head, b"transfer-encoding: chunked", b"", chunks])
        return b"\r\n".join([*head, b"content-length: %d" % len(body), b"", body])

    def _changed(self, whole: bytes) -> bytes:
        at = self.random.randrange(len(whole) + 1)
        match self.random.randrange(4):
            case 0:
                return whole[:at] + self.random.choice(INSERTED) + whole[at:]
            case 1:
                return whole[:at] + whole[at + self.random.randrange(1, 20) :]
            case 2:
                return whole[:at] + bytes([self.random.randrange(256)]) + whole[at + 1 :]
            case _:
                end = self.random.randrange(at, len(whole) + 1)
                return whole[:end] + whole[at:end] + whole[end:]


async def connect(protocol: EdgeProtocol, client: Client, pieces: list[bytes], *, leaves: bool) -> None:
    """One connection's life, as far as its client decides."""
    client.protocol = protocol
    protocol.connection_made(client)
    for piece in pieces:
        if client.is_closing():
            break
        if piece:
            protocol.data_received(piece)
        await asyncio.sleep(0)
    if leaves:
        client.lose()


@asynccontextmanager
async def router_edge() -> AsyncIterator[Target]:
    """A router's, with one worker."""
    kept = {"response_bytes_max": 10_000, "files_bytes_max": FILES_BYTES_MAX}
    settings = Settings(log_requests=False, connections_per_address_max=0, decisions_bytes_max=500_000, **kept)
    async with open_world(settings) as here:
        await here.worker("w1", script=answer)
        edge = here.router.edge
        yield Target(
            edge,
            lambda: {"requests": len(here.router.relay.in_flight), "bytes of bodies": edge.upload_totals.bytes_held},
        )


@asynccontextmanager
async def collector_edge() -> AsyncIterator[Target]:
    """A metrics collector's, with the console."""
    asyncio.get_running_loop().set_default_executor(AtOnce())
    async with world(LoopClock(), watchers=WatcherLimits()) as here, asyncio.TaskGroup() as tasks:
        limits = msgspec.structs.replace(LIMITS, connections_per_address_max=0)
        feed, edge = here.collector.feed, CollectorEdge(here.app, LoopClock().now, limits, AllowedPages(""), LOOPBACK)
        running = [tasks.create_task(feed.follow()), tasks.create_task(edge.end_late())]
        yield Target(edge, lambda: {"places in the event stream": len(feed)})
        for task in running:
            task.cancel()


async def fuzz(
    campaign: Campaign, count: int, requests: Requests, opened: AbstractAsyncContextManager[Target], progress: Progress
) -> Campaign:
    """``count`` connections."""
    async with opened as target:
        server = make_server(target.edge)
        server.config.load()
        for _ in range(0, count // 10, BATCH):  # The first connections fill what is kept for ever.
            await batch(server, requests)
        with Watch() as watch:
            before, bytes_before = objects(), memory_bytes()
            for at in range(0, count, BATCH):
                clients = await batch(server, requests)
                campaign.sent += len(clients)
                campaign.heard += sum(bool(client.written) for client in clients)
                campaign.read += sum(client.written.startswith(b"HTTP/1.1 200") for client in clients)
                found = [fault for client in clients if (fault := Answers().fault(bytes(client.written)))]
                campaign.findings += found[:1]
                if at % 1000 == 0:
                    progress(campaign.name, campaign.sent)
            await asyncio.sleep(SETTLE_S)
            campaign.findings += [*left_over(target, server), *watch.findings]
            campaign.objects_grown, campaign.bytes_grown = objects() - before, memory_bytes() - bytes_before
    if campaign.objects_grown > OBJECTS_GROWN_MAX:
        campaign.findings.append(f"{campaign.objects_grown} more objects than before")
    return campaign


async def batch(server: Any, requests: Requests) -> list[Client]:
    """Some connections side by side; half of the clients wait until they are let go, unless their response is endless."""
    clients = [Client(reads=requests.random.random() >= NOT_READ_SHARE) for _ in range(BATCH)]
    lives = []
    for client in clients:
        protocol = EdgeProtocol(config=server.config, server_state=server.server_state, app_state={})
        leaves = requests.random.random() < 0.5
        lives.append(asyncio.create_task(connect(protocol, client, requests.sent(), leaves=leaves)))
    await asyncio.gather(*lives)
    await asyncio.sleep(PAUSE_S)
    for client in clients:
        if ENDLESS in client.written:
            client.lose()
    return clients


def left_over(target: Target, server: Any) -> list[str]:
    """Of connections that have all ended."""
    edge = target.edge
    held = {
        **target.held(),
        "uploads": len(edge.uploads),
        "connections": edge.connections.count + len(server.server_state.connections),
        "tasks": len(server.server_state.tasks),
        "clients that are waited for": len(edge.idle._asking) + len(edge.idle._reading),
    }
    return [f"{count} {what} are left over" for what, count in held.items() if count]


def fuzz_edges(count: int, seed: int, progress: Progress) -> list[Campaign]:
    """Of router and collector, in virtual time."""
    return [
        run_in_virtual_time(fuzz(Campaign(f"HTTP of {name}"), count, Requests(seed, asked), opened, progress))
        for name, asked, opened in (
            ("the router", OF_ROUTER, router_edge()),
            ("the collector", OF_COLLECTOR, collector_edge()),
        )
    ]
