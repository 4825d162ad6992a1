"""A lean HTTP load client in one process: ``python -m bench.load_client --port 8000 --connections 64 --seconds 5``.

Closed loop: each connection sends its next request when it has its answer. Open loop (``--rate``): Poisson arrivals;
latency counts from the scheduled arrival, so that a stall does not hide the requests that it delayed.
``--requests`` and ``--conversations`` send a given number of requests instead, without a warm-up. ``--then-port`` serves
each request by two servers, as a P/D proxy that takes no time: ``--first-leg`` says what the first one is asked.
Each prompt is new prose, unless ``--prompts`` says how many there are. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, count, cycle, islice
from typing import Any

import uvloop

from bench.prose import Prose

TURN_TOKENS = 100
"""That a turn of a conversation adds."""
DRAIN_S = 5.0
"""After the measured time: for answers that are on the way."""
COUNTED_S_MAX = 120.0
"""For a run with a given number of requests."""
EVENT, LINE_END = b"data: ", b"\r\n"
TAIL_BYTES = 16
COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
HEAD_END = b"\r\n\r\n"
SAME, PREFILL, OFFER = "same", "prefill", "offer"
FIRST_LEGS: dict[str, dict[str, Any] | None] = {
    SAME: None,
    PREFILL: {"max_tokens": 1},
    OFFER: {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}},
}
"""Fields of a request's first leg that differ from it: nothing, its first token only, and with it an offer of the KV by
vLLM's connector, which the second leg then names.
"""
TRANSFER = "kv_transfer_params"


class Answers:
    """What came back. An answer with another status than 200, or with fewer tokens than it should have, is an error."""

    def __init__(self, tokens: int, *, stream: bool) -> None:
        self.tokens = tokens
        """Of each answer."""
        self.stream = stream
        self.measuring = False
        self.ended = 0
        """Answers since the start, errors included."""
        self.done = 0
        self.errors = 0
        self.short = 0
        """Answers with too few tokens; they are errors, too."""
        self.events = 0
        self.latencies_s: list[float] = []
        self.first_event_s: list[float] = []
        self.first_error = ""

    def fail(self, why: bytes) -> None:
        self.errors += 1
        self.first_error = self.first_error or why[:800].decode("latin-1")


class Connection(asyncio.Protocol):
    """One keep-alive connection; reads just enough of HTTP to know when an answer ends."""

    def __init__(self, answers: Answers, on_idle: Callable[[Connection], None], script: Iterator[bytes]) -> None:
        self.script = script
        """Requests to send, one after the other."""
        self.partner: Connection | None = None
        """Gets the request when the answer to its first leg is complete; the time of both counts as one."""
        self.first_leg = SAME
        """One of ``FIRST_LEGS``, with a partner."""
        self._answers = answers
        self._on_idle = on_idle
        self._request = b""
        self._tokens = 0
        """That its answer has."""
        self._begun_at = 0.0
        self._first_at = 0.0
        self._head = b""
        self._left = -1
        """Body bytes to come; -1 while the head is read, -2 for chunks until their end."""
        self._tail = b""
        """What came of the body; of a stream, its end."""
        self._chunk = 0
        """Bytes of the chunk to come."""
        self._between = 0
        """Bytes of the line end behind a chunk to come."""
        self._line = b""
        """The beginning of a chunk's size."""
        self._is_last = False
        self._events = 0
        self._failed = False
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def send(self, request: bytes, begun_at: float) -> None:
        self._request = request
        self._begun_at = begun_at
        self._first_at = 0.0
        self._head = b""
        self._left = -1
        self._chunk = self._between = self._events = 0
        self._is_last = self._failed = False
        fields = FIRST_LEGS[self.first_leg]
        self._tokens = fields["max_tokens"] if fields else self._answers.tokens
        self.transport.write(with_fields(request, fields) if fields else request)

    def data_received(self, data: bytes) -> None:
        if self._left == -1:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = self._head[:end].lower(), self._head[end + 4 :]
            if not head.startswith(b"http/1.1 200"):
                self._failed = True
                self._answers.fail(self._head)
            at = head.find(b"content-length: ")
            self._left = int(head[at + 16 :].split(b"\r", 1)[0]) if at >= 0 else -2
            self._tail = b""
        if self._left == -2:
            self._take_chunks(data)
        else:
            self._left -= len(data)
            self._tail += data
            if self._left <= 0:
                self._end()

    def _take_chunks(self, data: bytes) -> None:
        """A router may cut chunks anywhere, also within an event."""
        data = self._line + data
        self._line = b""
        at, parts, ended = 0, [], False
        while at < len(data) and not ended:
            if self._chunk:
                parts.append(data[at : at + self._chunk])
                at += len(parts[-1])
                self._chunk -= len(parts[-1])
                self._between = 0 if self._chunk else len(LINE_END)
            elif self._between:
                skipped = min(self._between, len(data) - at)
                at += skipped
                self._between -= skipped
                ended = self._is_last and not self._between
            elif (end := data.find(LINE_END, at)) < 0:
                self._line = data[at:]
                at = len(data)
            else:
                self._chunk = int(data[at:end], 16)
                at = end + len(LINE_END)
                self._is_last = not self._chunk
                self._between = len(LINE_END) if self._is_last else 0
        joined = self._tail + b"".join(parts)
        if self._answers.stream and (events := joined.count(EVENT) - self._tail.count(EVENT)):
            self._events += events
            self._first_at = self._first_at or time.perf_counter()
            self._answers.events += events if self._answers.measuring else 0
        self._tail = joined[-TAIL_BYTES:] if self._answers.stream else joined
        if ended:
            self._end()

    def _is_whole(self) -> bool:
        """Whether the answer has all its tokens; a stream has an event for each and one at its end."""
        if self._answers.stream:
            return self._events == self._tokens + 1
        return COMPLETION_TOKENS.findall(self._tail) == [b"%d" % self._tokens]

    def _end(self) -> None:
        answers, now = self._answers, time.perf_counter()
        if not self._failed and not self._is_whole():
            self._failed = True
            answers.short += 1
            answers.fail(b"an answer with too few tokens: " + self._tail)
        self._left = -1
        self._head = b""
        if self.partner is not None and not self._failed:
            self.partner.send(self._second_leg(), self._begun_at)
            return
        answers.ended += 1
        if answers.measuring and not self._failed:
            answers.done += 1
            answers.latencies_s.append(now - self._begun_at)
            if self._first_at:
                answers.first_event_s.append(self._first_at - self._begun_at)
        self._on_idle(self)

    def _second_leg(self) -> bytes:
        if self.first_leg != OFFER:
            return self._request
        return with_fields(self._request, {TRANSFER: json.loads(self._tail)[TRANSFER]})

    def connection_lost(self, exc: Exception | None) -> None:
        if self._left != -1 or self._head:
            self._answers.fail(b"connection lost")


def request_of(arguments: argparse.Namespace, prompt: str) -> bytes:
    fields = {"model": arguments.model, "prompt": prompt, "max_tokens": arguments.max_tokens}
    return http_request({**fields, "stream": arguments.stream, "temperature": 0, "ignore_eos": True})


def http_request(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: bench\r\nx-baton-mode: disaggregated\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def with_fields(request: bytes, fields: dict[str, Any]) -> bytes:
    return http_request(json.loads(request.partition(HEAD_END)[2]) | fields)


def make_requests(arguments: argparse.Namespace) -> Iterator[bytes]:
    """The requests of a run. None begins like another one, or one of another seed, unless they are used in turn."""
    prose = Prose(f"requests {arguments.seed}")
    new = (request_of(arguments, prose.text(arguments.prompt_tokens)) for _ in count())
    if arguments.prompts:
        return cycle(list(islice(new, arguments.prompts)))
    # Made before the run, where their number is known: making them takes time of the engines' core.
    known = arguments.requests or int(1.2 * arguments.rate * (arguments.warm_up + arguments.seconds))
    return chain(list(islice(new, known)), new)


def turns(arguments: argparse.Namespace, conversation: int) -> Iterator[bytes]:
    """The requests of one conversation: each prompt is the one before it and some sentences more."""
    prose = Prose(f"conversation {conversation} of {arguments.seed}")
    prompt = prose.text(arguments.prompt_tokens)
    for turn in range(arguments.turns_to):
        if turn:
            prompt += f"\n\n{prose.text(TURN_TOKENS)}"
        if turn >= arguments.turns_from:
            yield request_of(arguments, prompt)


def make_scripts(arguments: argparse.Namespace) -> list[Iterator[bytes]]:
    """What each connection sends. A conversation stays on one connection, which waits for each of its answers."""
    each = arguments.connections
    if arguments.conversations:
        return [
            chain.from_iterable(turns(arguments, number) for number in range(first, arguments.conversations, each))
            for first in range(each)
        ]
    requests = make_requests(arguments)
    shared = islice(requests, arguments.requests) if arguments.requests else requests
    return [shared] * each


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    answers = Answers(arguments.max_tokens, stream=arguments.stream)
    sent = 0
    loop = asyncio.get_running_loop()
    idle: deque[Connection] = deque()
    late: deque[float] = deque()
    stopping = False

    def send_next(connection: Connection, begun_at: float) -> None:
        nonlocal sent
        request = next(connection.script, None)
        if request is None:
            idle.append(connection)
        else:
            sent += 1
            connection.send(request, begun_at)

    def on_idle(connection: Connection) -> None:
        if late:
            send_next(connection, late.popleft())
        elif arguments.rate or stopping:
            idle.append(connection)
        else:
            send_next(connection, time.perf_counter())

    async def connect(port: int, script: Iterator[bytes], idle: Callable[[Connection], None]) -> Connection:
        return (await loop.create_connection(lambda: Connection(answers, idle, script), "127.0.0.1", port))[1]

    connections = [await connect(arguments.port, script, on_idle) for script in make_scripts(arguments)]
    if arguments.then_port:
        for first in connections:
            first.partner = await connect(arguments.then_port, iter(()), lambda _, first=first: on_idle(first))
            first.first_leg = arguments.first_leg
    if arguments.rate:
        idle.extend(connections)
        arriving = asyncio.ensure_future(arrive(arguments, idle, late, send_next))
    else:
        for connection in connections:
            send_next(connection, time.perf_counter())
    counted = bool(arguments.requests or arguments.conversations)
    if not counted:
        await asyncio.sleep(arguments.warm_up)
    answers.measuring, begun_at = True, time.perf_counter()
    if counted:
        while len(idle) < len(connections) and time.perf_counter() - begun_at < COUNTED_S_MAX:
            await asyncio.sleep(0.01)
    else:
        await asyncio.sleep(arguments.seconds)
    answers.measuring, measured_s = False, time.perf_counter() - begun_at
    stopping = True
    if arguments.rate:
        arriving.cancel()
    until = time.perf_counter() + DRAIN_S
    while len(idle) < len(connections) and time.perf_counter() < until:
        await asyncio.sleep(0.01)
    return summary(answers, measured_s, sent)


async def arrive(
    arguments: argparse.Namespace,
    idle: deque[Connection],
    late: deque[float],
    send_next: Callable[[Connection, float], None],
) -> None:
    """Poisson arrivals, for ever."""
    dice = random.Random(arguments.seed)
    due = time.perf_counter()
    while True:
        due += dice.expovariate(arguments.rate)
        wait_s = due - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        if idle:
            send_next(idle.popleft(), due)
        else:
            late.append(due)


def summary(answers: Answers, measured_s: float, sent: int) -> dict[str, Any]:
    return {
        "sent": sent,
        "ended": answers.ended,
        "done": answers.done,
        "errors": answers.errors,
        "short": answers.short,
        "requests_per_s": answers.done / measured_s,
        "events_per_s": answers.events / measured_s,
        "latency_ms": quantiles(answers.latencies_s),
        "first_event_ms": quantiles(answers.first_event_s),
        "first_error": answers.first_error,
    }


def quantiles(values_s: list[float]) -> dict[str, float]:
    ordered = sorted(values_s)
    if not ordered:
        return {}
    return {
        name: round(ordered[min(len(ordered) - 1, int(part * len(ordered)))] * 1e3, 3)
        for name, part in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--warm-up", type=float, default=1.0)
    parser.add_argument("--rate", type=float, default=0.0, help="requests per second; 0: closed loop")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=100, help="of baton-tiny's tokenizer, about")
    parser.add_argument("--prompts", type=int, default=0, help="send so many prompts in turn; 0: a new one each time")
    parser.add_argument("--model", default="baton-tiny")
    parser.add_argument("--seed", default="1", help="each has prompts and arrivals of its own")
    parser.add_argument("--requests", type=int, default=0, help="send so many, for as long as it takes")
    parser.add_argument("--conversations", type=int, default=0, help="send turns of so many conversations")
    parser.add_argument("--turns-from", type=int, default=0, help="the first turn of each that is sent")
    parser.add_argument("--turns-to", type=int, default=1, help="how many turns each has")
    parser.add_argument("--then-port", type=int, default=0, help="send each request there, too, after its answer")
    parser.add_argument("--first-leg", choices=FIRST_LEGS, default=SAME, help="what is asked before that")
    return parser


def main() -> None:
    print(json.dumps(uvloop.run(run(make_parser().parse_args()))))


if __name__ == "__main__":
    main()
