"""A lean HTTP load client in one process: ``python -m bench.load_client --port 8000 --connections 64 --seconds 5``.

Closed loop: each connection sends its next request when it has its answer. Open loop (``--rate``): Poisson arrivals;
latency counts from the scheduled arrival, so that a stall does not hide the requests that it delayed.
Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import deque
from typing import Any

import uvloop

SENTENCE = "The relay of a request begins with its prompt and ends with the last token of its completion. "
PREFIXES = 8
"""Different beginnings, used in turn; three quarters of a prompt are its beginning."""
SHARED_PART = 0.75
DRAIN_S = 5.0
"""After the measured time: for answers that are on the way."""


class Answers:
    """What came back."""

    def __init__(self) -> None:
        self.measuring = False
        self.done = 0
        self.errors = 0
        self.events = 0
        self.latencies_s: list[float] = []
        self.first_event_s: list[float] = []
        self.first_error = ""


class Connection(asyncio.Protocol):
    """One keep-alive connection; reads just enough of HTTP to know when an answer ends."""

    def __init__(self, answers: Answers, on_idle: Any) -> None:
        self._answers = answers
        self._on_idle = on_idle
        self._begun_at = 0.0
        self._first_at = 0.0
        self._head = b""
        self._left = -1
        """Body bytes to come; -1 while the head is read, -2 for chunks until their end."""
        self._tail = b""
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def send(self, request: bytes, begun_at: float) -> None:
        self._begun_at = begun_at
        self._first_at = 0.0
        self._head = b""
        self._left = -1
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self._left == -1:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = self._head[:end].lower(), self._head[end + 4 :]
            if not head.startswith(b"http/1.1 200"):
                self._fail(self._head)
            at = head.find(b"content-length: ")
            self._left = int(head[at + 16 :].split(b"\r", 1)[0]) if at >= 0 else -2
            self._tail = b""
        if self._left == -2:
            self._take_events(data)
        else:
            self._left -= len(data)
            if self._left <= 0:
                self._end()

    def _take_events(self, data: bytes) -> None:
        if not data:
            return
        events = data.count(b"data: ")
        if events:
            self._first_at = self._first_at or time.perf_counter()
            self._answers.events += events if self._answers.measuring else 0
        self._tail = (self._tail + data)[-7:]
        if self._tail.endswith(b"\r\n0\r\n\r\n"):
            self._end()

    def _end(self) -> None:
        answers, now = self._answers, time.perf_counter()
        if answers.measuring:
            answers.done += 1
            answers.latencies_s.append(now - self._begun_at)
            if self._first_at:
                answers.first_event_s.append(self._first_at - self._begun_at)
        self._left = -1
        self._head = b""
        self._on_idle(self)

    def _fail(self, head: bytes) -> None:
        self._answers.errors += 1
        self._answers.first_error = self._answers.first_error or head[:200].decode("latin-1")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._left != -1 or self._head:
            self._fail(b"connection lost")


def make_requests(arguments: argparse.Namespace) -> list[bytes]:
    """Distinct requests, used in turn."""
    size, requests = arguments.prompt_bytes, []
    for number in range(2048 if size < 4096 else 512):
        group = number % PREFIXES
        beginning = (f"Document {group}. " + SENTENCE * (size // len(SENTENCE) + 1))[: int(size * SHARED_PART)]
        ending = (f" Question {number} of {arguments.seed}. " + SENTENCE * (size // len(SENTENCE) + 1))[
            : size - len(beginning)
        ]
        fields = {"model": arguments.model, "prompt": beginning + ending, "max_tokens": arguments.max_tokens}
        body = json.dumps({**fields, "stream": arguments.stream, "temperature": 0, "ignore_eos": True}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: bench\r\nx-baton-mode: disaggregated\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        requests.append(head.encode() + body)
    return requests


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    answers, requests = Answers(), make_requests(arguments)
    sent = 0
    loop = asyncio.get_running_loop()
    idle: deque[Connection] = deque()
    late: deque[float] = deque()
    stopping = False

    def next_request() -> bytes:
        nonlocal sent
        sent += 1
        return requests[sent % len(requests)]

    def on_idle(connection: Connection) -> None:
        if late:
            connection.send(next_request(), late.popleft())
        elif arguments.rate or stopping:
            idle.append(connection)
        else:
            connection.send(next_request(), time.perf_counter())

    connections = [
        (await loop.create_connection(lambda: Connection(answers, on_idle), "127.0.0.1", arguments.port))[1]
        for _ in range(arguments.connections)
    ]
    if arguments.rate:
        idle.extend(connections)
        arriving = asyncio.ensure_future(arrive(arguments, idle, late, next_request))
    else:
        for connection in connections:
            connection.send(next_request(), time.perf_counter())
    await asyncio.sleep(arguments.warm_up)
    answers.measuring, begun_at = True, time.perf_counter()
    await asyncio.sleep(arguments.seconds)
    answers.measuring, measured_s = False, time.perf_counter() - begun_at
    stopping = True
    if arguments.rate:
        arriving.cancel()
    until = time.perf_counter() + DRAIN_S
    while len(idle) < len(connections) and time.perf_counter() < until:
        await asyncio.sleep(0.01)
    return summary(answers, measured_s, sent)


async def arrive(arguments: argparse.Namespace, idle: deque[Connection], late: deque[float], next_request: Any) -> None:
    """Poisson arrivals, for ever."""
    dice = random.Random(arguments.seed)
    due = time.perf_counter()
    while True:
        due += dice.expovariate(arguments.rate)
        wait_s = due - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        if idle:
            idle.popleft().send(next_request(), due)
        else:
            late.append(due)


def summary(answers: Answers, measured_s: float, sent: int) -> dict[str, Any]:
    return {
        "sent": sent,
        "done": answers.done,
        "errors": answers.errors,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--warm-up", type=float, default=1.0)
    parser.add_argument("--rate", type=float, default=0.0, help="requests per second; 0: closed loop")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--prompt-bytes", type=int, default=200)
    parser.add_argument("--model", default="baton-tiny")
    parser.add_argument("--seed", type=int, default=1)
    print(json.dumps(uvloop.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
