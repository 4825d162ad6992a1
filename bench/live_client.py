"""A client that sends the requests of a trace when they are due and records when tokens arrive."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from replay.traces import BLOCK_TOKENS, Request

FIRST_TOKEN_ID, LAST_TOKEN_ID = 100, 999
"""Of three digits each: prompts are as long in bytes as those of usual vocabularies."""
ANSWER_S_MAX = 600.0
READ_BYTES = 1 << 16


@dataclass(slots=True)
class Outcome:
    """Of one request; instants count from the trace's start, and from when the request was due."""

    request: Request
    status: int = 0
    sent_at: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    events: int = 0
    worker: str = ""

    @property
    def well(self) -> bool:
        return self.status == 200 and self.events >= self.request.output_tokens

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.request.at_s

    @property
    def tpot_s(self) -> float:
        return (self.last_at - self.first_at) / max(1, self.request.output_tokens - 1)


@cache
def block_json(block: int) -> bytes:
    """The tokens of a block of the trace: equal ids, equal tokens."""
    dice = random.Random(block)
    return b",".join(b"%d" % dice.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(BLOCK_TOKENS))


def prompt_json(number: int, request: Request) -> bytes:
    """The blocks of its prompt and a unique end."""
    rest = request.input_tokens - len(request.blocks) * BLOCK_TOKENS
    dice = random.Random(f"end of {number}")
    end = b",".join(b"%d" % dice.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(rest))
    return b",".join([part for part in (*map(block_json, request.blocks), end) if part])


def http_request(number: int, request: Request) -> bytes:
    """A whole streamed completion request."""
    body = b'{"model":"baton-tiny","stream":true,"ignore_eos":true,"temperature":0,"max_tokens":%d,"prompt":[%b]}' % (
        request.output_tokens,
        prompt_json(number, request),
    )
    head = f"POST /v1/completions HTTP/1.1\r\nhost: live\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def replay(requests: list[Request], port: int, told: Callable[[int], None]) -> list[Outcome]:
    """All requests, each when it is due; ``told`` how many were sent."""
    start = time.perf_counter() + 0.5
    running = []
    for number, request in enumerate(requests):
        payload = http_request(number, request)
        await asyncio.sleep(start + request.at_s - time.perf_counter())
        running.append(asyncio.create_task(_one(request, payload, port, start)))
        told(number + 1)
    return list(await asyncio.gather(*running))


async def _one(request: Request, payload: bytes, port: int, start: float) -> Outcome:
    outcome = Outcome(request)
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(payload)
            outcome.sent_at = time.perf_counter() - start
            head = await reader.readuntil(b"\r\n\r\n")
            outcome.status = int(head.split(b" ", 2)[1])
            outcome.worker = _header(head, b"x-baton-decode-worker")
            while data := await reader.read(READ_BYTES):
                _take(outcome, data, time.perf_counter() - start)
            writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        outcome.status = outcome.status or -1
    return outcome


def _take(outcome: Outcome, data: bytes, now: float) -> None:
    """Each token is an event; the end is one, too, and no token."""
    events = data.count(b"data: {")
    if events:
        outcome.first_at = outcome.first_at or now
        outcome.last_at = now
        outcome.events += events


def _header(head: bytes, name: bytes) -> str:
    for line in head.split(b"\r\n"):
        key, _, value = line.partition(b": ")
        if key.lower() == name:
            return value.decode()
    return ""
