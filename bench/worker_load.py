"""Requests for ``bench.bench_worker``: the same bodies over HTTP to vLLM's server, or as legs over NATS to a worker, as a router sends them.

Both clients only note times and keep bytes while requests run, so that they take little of the machine's cores; ``checked`` reads the answers
afterwards.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from bench.peer_checks import RunFailed
from bench.prose import Prose
from shared.bus.leg_inbox import Leg, LegInbox, LegReader
from shared.bus.port import Bus
from shared.contracts.ids import LegId, RequestId, RouterId
from shared.contracts.inference import FrameKind, LegKind, StartLeg
from shared.contracts.workers import WorkerRecord

PATH = "/v1/completions"
PROMPT_TOKENS = 64
"""Of baton-tiny, about."""
DEADLINE_S = 60.0
RUN_S_MAX = 120.0
LAST_CHUNK = b"\r\n0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')


@dataclass(slots=True)
class Answer:
    """One request and what came of it. Instants are of ``time.perf_counter``."""

    begun_at: float
    first_at: float = 0.0
    """When its first data came: of a stream, its first event with a token."""
    ended_at: float = 0.0
    pieces: list[bytes] = field(default_factory=list)
    token_ids: int = -1
    """Token ids in the frames of a leg; -1 over HTTP."""
    failure: str = ""


def make_text(chars: int) -> str:
    """The same text each time."""
    return Prose("known").text(chars)[:chars]


def make_bodies(count: int, *, tokens: int, stream: bool, seed: str, history: str = "") -> list[bytes]:
    """Bodies of distinct prompts, of which no cache has more than ``history``."""
    fields: dict[str, Any] = {"model": "baton-tiny", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    prose = Prose(seed)
    return [json.dumps({**fields, "prompt": history + prose.text(PROMPT_TOKENS)}).encode() for _ in range(count)]


class Run:
    """The requests of one run: each of ``at_once`` senders sends its next one when it has its answer."""

    def __init__(self, bodies: Sequence[bytes]) -> None:
        self.bodies: Iterator[bytes] = iter(bodies)
        self.answers: list[Answer] = []
        self.over = asyncio.Event()
        self._open = 0

    def begin(self) -> tuple[bytes, Answer] | None:
        """The next request; None: all have been sent."""
        body = next(self.bodies, None)
        if body is None:
            return None
        self._open += 1
        answer = Answer(time.perf_counter())
        self.answers.append(answer)
        return body, answer

    def ended(self, answer: Answer) -> None:
        """Call it before the same sender begins its next request."""
        answer.ended_at = time.perf_counter()
        self._open -= 1

    def sender_idle(self) -> None:
        if not self._open:
            self.over.set()


class Client(Protocol):
    """Sends requests to one server."""

    async def run(self, bodies: Sequence[bytes], at_once: int) -> list[Answer]:
        """All answers, in the order of their requests."""


class _Connection(asyncio.Protocol):
    """A keep-alive connection; reads just enough to know when an answer ends."""

    def __init__(self, run: Run) -> None:
        self.transport: Any = None
        self._run = run
        self._answer: Answer | None = None
        self._left = -1
        """Bytes of the body to come; -1: the head has not come, -2: chunks come until their end."""
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def send_next(self) -> None:
        begun = self._run.begin()
        if begun is None:
            self._run.sender_idle()
            return
        body, self._answer = begun
        self._left, self._tail = -1, b""
        head = f"POST {PATH} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        assert answer is not None
        answer.pieces.append(data)
        if self._left == -1:
            head, _, data = data.partition(b"\r\n\r\n")  # vLLM's server sends a head at once.
            if not head.startswith(b"HTTP/1.1 200"):
                answer.failure = head[:200].decode("latin-1")
            at = head.lower().find(b"content-length: ")
            self._left = int(head[at + 16 :].split(b"\r", 1)[0]) if at >= 0 else -2
        if data and not answer.first_at:
            answer.first_at = time.perf_counter()
        if self._left == -2:
            self._tail = (self._tail + data)[-len(LAST_CHUNK) :]
            if self._tail == LAST_CHUNK:
                self._end()
        else:
            self._left -= len(data)
            if not self._left:
                self._end()

    def _end(self) -> None:
        assert self._answer is not None
        self._run.ended(self._answer)
        self._answer = None
        self.send_next()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None:
            self._answer.failure = "the connection was lost"
            self._run.over.set()


class HttpClient:
    """At vLLM's server."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def run(self, bodies: Sequence[bytes], at_once: int) -> list[Answer]:
        """Over as many new connections: the server closes those that are idle for some seconds."""
        loop, run, connections = asyncio.get_running_loop(), Run(bodies), list[_Connection]()
        try:
            for _ in range(at_once):
                connections.append((await loop.create_connection(lambda: _Connection(run), "127.0.0.1", self._port))[1])
            for connection in connections:
                connection.send_next()
            return await until_over(run)
        finally:
            for connection in connections:
                connection.transport.close()


class _Sender(LegReader):
    """Sends one leg after the other."""

    def __init__(self, client: BusClient, run: Run) -> None:
        self._client = client
        self._run = run
        self._answer: Answer | None = None

    def send_next(self) -> None:
        begun = self._run.begin()
        if begun is None:
            self._run.sender_idle()
            return
        body, self._answer = begun
        self._answer.token_ids = 0
        if self._client.inbox.start_now(self._client.leg(body), self) is None:
            self._answer.failure = "the bus did not take the leg at once"
            self._end()

    def leg_changed(self, leg: Leg) -> None:
        answer, ended = self._answer, leg.has_failed
        assert answer is not None
        for frame in leg.frames():
            if frame.status not in (0, 200):
                answer.failure = f"status {frame.status}"
            if frame.data or frame.token_ids:
                answer.first_at = answer.first_at or time.perf_counter()
                answer.pieces.append(frame.data)
                answer.token_ids += len(frame.token_ids)
            ended |= frame.kind is FrameKind.END
        if leg.has_failed:
            answer.failure = str(leg.failure())
        if ended:
            self._end()

    def leg_crashed(self, bug: Exception) -> None:
        raise bug

    def _end(self) -> None:
        assert self._answer is not None
        self._run.ended(self._answer)
        self._answer = None
        self.send_next()


class BusClient:
    """At a worker, with a router's end of the bus."""

    def __init__(self, bus: Bus, record: WorkerRecord) -> None:
        self._record = record
        self._router_id = RouterId(f"bench-{uuid4().hex[:8]}")
        self.inbox = LegInbox(bus, self._router_id, leg_buffer_bytes_max=64 << 20)

    async def open(self) -> None:
        await self.inbox.open()

    def leg(self, body: bytes) -> StartLeg:
        """As a router starts the only leg of a request."""
        return StartLeg(
            worker_id=self._record.worker_id,
            router_id=self._router_id,
            request_id=RequestId(uuid4().hex),
            leg_id=LegId(uuid4().hex),
            kind=LegKind.AGGREGATED,
            path=PATH,
            body=body,
            epoch=self._record.epoch,
            deadline_s=DEADLINE_S,
            answer_id=uuid4().hex,
        )

    async def run(self, bodies: Sequence[bytes], at_once: int) -> list[Answer]:
        run = Run(bodies)
        for _ in range(at_once):
            _Sender(self, run).send_next()
        return await until_over(run)


async def until_over(run: Run) -> list[Answer]:
    """Raises RunFailed when the answers do not come."""
    try:
        async with asyncio.timeout(RUN_S_MAX):
            await run.over.wait()
    except TimeoutError:
        raise RunFailed(f"not all of {len(run.answers)} requests were answered within {RUN_S_MAX:g} s") from None
    return run.answers


def check(answers: Sequence[Answer], requests: int, *, tokens: int, stream: bool) -> None:
    """Every request was answered, without a failure and with so many tokens. Raises RunFailed."""
    if len(answers) != requests:
        raise RunFailed(f"{len(answers)} of {requests} requests were sent")
    for answer in answers:
        text = b"".join(answer.pieces)
        if answer.failure or not answer.ended_at:
            raise RunFailed(f"a request failed: {answer.failure or 'no end'} {text[:200]!r}")
        if stream and DONE not in text:
            raise RunFailed(f"a stream without its end: {text[-200:]!r}")
        counted = COMPLETION_TOKENS.findall(text)
        if counted != [b"%d" % tokens] or answer.token_ids not in (-1, tokens):
            raise RunFailed(f"an answer of {counted} tokens, {answer.token_ids} token ids: {text[-200:]!r}")
