"""Decisions of a router process in front of workers that only hold requests: for ``bench.peer_decisions``.

The router is started as its package documents, on the loopback, with its policy ``cache_aware``. Each prompt is a text in
which equal blocks are equal characters, one for a token. A worker answers a request when the scenario ends it, so the
requests in flight, which are the router's load, are those of the scenario.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from bench.peer_scenario import Decision, Scenario, Step, StepKind

START_S_MAX = 60.0
STARTS_MAX = 3
STEP_S_MAX = 20.0
POLL_S = 0.002
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def text_of(step: Step, block_tokens: int) -> str:
    """The prompt, as long in characters as in tokens."""
    blocks = "".join(_letters(f"block {block}", block_tokens) for block in step.blocks)
    return blocks + _letters(f"rest {step.number}", step.tokens - len(blocks))


def _letters(seed: str, count: int) -> str:
    return "".join(random.Random(seed).choices(ALPHABET, k=count))


@dataclass(slots=True)
class Held:
    """Requests at the workers, by number."""

    arrived: asyncio.Queue[tuple[int, int]] = field(default_factory=asyncio.Queue)
    """Number and worker."""
    released: dict[int, asyncio.Event] = field(default_factory=dict)


class Worker:
    """An HTTP server that answers completions when told to, and everything else at once."""

    def __init__(self, index: int, held: Held) -> None:
        self._index = index
        self._held = held

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while (request := await _read(reader)) is not None:
                line, body = request
                said: Any = {"status": "ok", "data": [{"id": "m", "object": "model"}]}
                path = line.split(" ")[1]
                if path == "/v1/completions":
                    number = int(json.loads(body)["max_tokens"]) - 1
                    event = self._held.released.setdefault(number, asyncio.Event())
                    self._held.arrived.put_nowait((number, self._index))
                    await event.wait()
                    said = {"id": str(number), "object": "text_completion", "choices": [{"index": 0, "text": "x"}]}
                elif path == "/v1/completions/render":
                    # vllm-router goes by the tokens of a worker, and by load alone where it gets none.
                    said = [{"model": "m", "token_ids": [ord(one) for one in json.loads(body)["prompt"]]}]
                answer = json.dumps(said).encode()
                head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(answer)}\r\n\r\n"
                writer.write(head.encode() + answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the router has closed it, or the scenario is over
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader) -> tuple[str, bytes] | None:
    """First line and body; None at the end of the connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    if not lines[0].endswith("HTTP/1.1"):
        return None  # a probe for gRPC
    lengths = [line.split(":")[1] for line in lines if line.lower().startswith("content-length:")]
    return lines[0], await reader.readexactly(int(lengths[0]) if lengths else 0)


class Router:
    """Its HTTP port."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer's JSON, or None without one; raises OSError while nobody listens."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            sent = b"" if body is None else json.dumps(body).encode()
            head = (
                f"{method} {path} HTTP/1.1\r\nHost: router\r\nConnection: close\r\nContent-Type: application/json\r\n"
            )
            writer.write(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
            answer = await reader.read()
        finally:
            writer.close()
        head_bytes, _, rest = answer.partition(b"\r\n\r\n")
        if b" 200 " not in head_bytes.split(b"\r\n")[0]:
            return None
        return json.loads(rest) if rest[:1] in (b"{", b"[") else {}

    async def counts(self, expected: dict[str, int], within_s: float) -> None:
        """Wait until it knows these workers with so many requests in flight; raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while await self._loads() != expected:
                await asyncio.sleep(POLL_S)

    async def _loads(self) -> dict[str, int]:
        try:
            said = await self.ask("GET", "/workers")
        except OSError:
            return {}  # it starts
        return {one["url"]: one["load"] for one in (said or {}).get("workers", [])}


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def decisions(launcher: Sequence[str], of: Scenario) -> list[Decision]:
    """The router's choice for each arrival. ``launcher``: the command, to which addresses and the policy are added."""
    return asyncio.run(_decisions(launcher, of))


async def _decisions(launcher: Sequence[str], of: Scenario) -> list[Decision]:
    held = Held()
    async with AsyncExitStack() as stack:
        urls = []
        for index in range(of.workers):
            server = await asyncio.start_server(Worker(index, held).serve, "127.0.0.1", 0)
            stack.callback(server.close)
            urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        process, router = await _started(launcher, urls)
        try:
            return [decision async for decision in Run(of, router, urls, held).decisions()]
        finally:
            process.kill()  # a graceful end waits for what the workers hold
            await process.wait()


async def _started(launcher: Sequence[str], urls: list[str]) -> tuple[Process, Router]:
    """A router that knows all workers. Started again when it ends: its ports were free, but are not reserved."""
    for _ in range(STARTS_MAX):
        port, metrics_port = free_ports(2)
        address = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
        said = ["--log-level", "error", "--disable-retries", "--policy", "cache_aware", "--worker-urls", *urls]
        process = await asyncio.create_subprocess_exec(*launcher, *address, *said, stdout=asyncio.subprocess.DEVNULL)
        router = Router(port)
        ready = asyncio.create_task(router.counts(dict.fromkeys(urls, 0), START_S_MAX))
        ended = asyncio.create_task(process.wait())
        await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            ended.cancel()
            try:
                await ready
            except TimeoutError:
                process.kill()
                raise
            return process, router
        ready.cancel()
    raise RuntimeError(f"{launcher[0]} ends {STARTS_MAX} times at its start")


class Run:
    """One scenario in front of one router."""

    def __init__(self, of: Scenario, router: Router, urls: list[str], held: Held) -> None:
        self.router = router
        self._of = of
        self._urls = urls
        self._held = held
        self._at: dict[int, int] = {}
        self._answers: dict[int, asyncio.Task[Any]] = {}

    def loads(self) -> dict[str, int]:
        """Requests in flight by URL."""
        return {url: sum(worker == index for worker in self._at.values()) for index, url in enumerate(self._urls)}

    async def decisions(self) -> AsyncIterator[Decision]:
        """In the order of arrivals."""
        for step in self._of.steps:
            if step.kind is StepKind.ARRIVES:
                prompt = text_of(step, self._of.block_tokens)
                # The number goes as the limit: routers take other fields, such as the user, as keys of sessions.
                body = {"model": "m", "prompt": prompt, "max_tokens": step.number + 1}
                self._answers[step.number] = asyncio.create_task(self.router.ask("POST", "/v1/completions", body))
                number, worker = await asyncio.wait_for(self._held.arrived.get(), STEP_S_MAX)
                assert number == step.number, f"{number} arrived instead of {step.number}"
                self._at[number] = worker
                yield Decision(number=number, worker=worker)
            elif step.kind is StepKind.ENDED:
                self._held.released[step.number].set()
                assert (await self._answers.pop(step.number))["id"] == str(step.number)
                del self._at[step.number]
                await self.router.counts(self.loads(), STEP_S_MAX)
