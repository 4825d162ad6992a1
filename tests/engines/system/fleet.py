"""A system with a prefill and a decode engine, as ``baton up`` starts it, on the test's own NATS, whose messages are small.

It has a router that streams each handoff; one that streams none, and asks no decode worker to serve a request alone of
which it lacks anything; and a store.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.kv_driver import BLOCK, Driver, body, driving
from tests.support.kv_tap import Tap
from tests.support.nats_server import NatsServer, free_port
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.processes import service_process
from tests.support.system import System, until
from tests.support.worker_processes import WorkerProcess, start_worker

PREFILL, DECODE, STORE = WORKERS = "prefill-1", "decode-1", "store-1"
STORE_FILES = "kv-store"
STORE_BYTES = str(64 << 20)
"""Size of its memory tier, and of its file tier."""
TOOLS = "--enable-auto-tool-choice --tool-call-parser pythonic"
COMPACT_JSON = """--structured-outputs-config '{"backend": "xgrammar", "disable_any_whitespace": true}'"""
"""A model that says nothing sensible may say spaces for ever where it is free to."""
PAIR = ("--prefill", "1", "--decode", "1", f"--engine-args={TOOLS} {COMPACT_JSON}")
NATS_PAYLOAD_BYTES_MAX = 64 * 1024
ENGINES_START_S_MAX = 480.0
ANSWER_S_MAX = 120.0
SERVICE_UNAVAILABLE = 503
AGAIN_S = 0.2
STREAM_ALL, STREAM_NONE = "0", "-1"
"""ROUTER_STREAM_TOKENS_MIN of the two endpoints."""
THRESHOLD = 0.8
"""WORKER_CACHE_HIT_THRESHOLD of all workers of a ``fleet_of_short_prompts``."""


@dataclass
class Fleet:
    nats: NatsServer
    receiver: OtlpReceiver
    """Of the traces of those who ask for one."""
    system: System
    endpoints: dict[str, str]
    """URLs of the routers by handoff: ``streamed`` or ``offered``."""
    folder: Path
    store: WorkerProcess

    def restart_store(self, *, empty: bool) -> None:
        """Kill the store and start it again, with the same files or without them."""
        self.store.kill()
        if empty:
            shutil.rmtree(self.folder / STORE_FILES)
        self.store = start_store(self.nats, self.folder)


def start_store(nats: NatsServer, folder: Path) -> WorkerProcess:
    """Start a store; it serves the blocks in the files of an earlier one."""
    sizes = {"store_memory_bytes": STORE_BYTES, "store_files_bytes": STORE_BYTES}
    return start_worker(nats.url, STORE, folder, environ={"BATON_STATE_DIR": str(folder)}, role="store", **sizes)


@contextmanager
def running_fleet(folder: Path, **variables: str) -> Iterator[Fleet]:
    """Starts two engines, so share one fleet between tests."""
    offered = free_port()
    with OtlpReceiver() as receiver, NatsServer(folder, max_payload=NATS_PAYLOAD_BYTES_MAX, has_buckets=True) as nats:
        tracing = {"BATON_OTLP_ENDPOINT": receiver.endpoint, "BATON_TRACE_SAMPLE_RATIO": "0"}
        no_copies = {"WORKER_KV_COPY_USES_MIN": "0"}  # The store copies only what a test orders.
        keeps = {"ROUTER_RESPONSE_BYTES_MAX": "1000000", "ROUTER_FILES_BYTES_MAX": "1000000"}
        env = {"ROUTER_STREAM_TOKENS_MIN": STREAM_ALL, **no_copies, **keeps, **tracing, **variables}
        with (
            System(folder / "state", *PAIR, nats_url=nats.url, env=env) as system,
            service_process(
                "router",
                folder,
                **tracing,
                BATON_NATS_URL=nats.url,
                ROUTER_PORT=str(offered),
                ROUTER_STREAM_TOKENS_MIN=STREAM_NONE,
                ROUTER_DECODE_FIRST_SHARE_MIN="1",
            ),
        ):
            endpoints = {"streamed": system.endpoint, "offered": f"http://127.0.0.1:{offered}"}
            fleet = Fleet(nats, receiver, system, endpoints, folder, start_store(nats, folder))
            try:
                system.wait_ready(ENGINES_START_S_MAX)
                until(
                    lambda: all(exact(url) == len(WORKERS) for url in endpoints.values()),
                    "all indexes are exact",
                    ENGINES_START_S_MAX,
                )
                yield fleet
            finally:
                fleet.store.kill()


def fleet_of_short_prompts(folder: Path) -> AbstractContextManager[Fleet]:
    """Tokens are worth fetching from the first block on, so that short prompts say much. All workers have a cache hit
    threshold, which no client may notice.
    """
    few = {"WORKER_KV_FETCH_MIN_TOKENS": str(BLOCK), "ROUTER_FETCH_TOKENS_MIN": str(BLOCK)}
    return running_fleet(folder, **few, WORKER_CACHE_HIT_THRESHOLD=str(THRESHOLD))


def exact(url: str) -> int:
    """Number of workers whose blocks the router knows exactly."""
    try:
        text = httpx.get(f"{url}/metrics", trust_env=False).text
    except httpx.HTTPError:
        return 0
    return sum('state="exact"' in line and line.endswith(" 1.0") for line in text.splitlines())


@dataclass(frozen=True)
class HttpReply:
    status: int
    request_id: str
    json: dict[str, Any]

    @property
    def choice(self) -> dict[str, Any]:
        (choice,) = self.json["choices"]
        return choice

    @property
    def token_ids(self) -> list[int]:
        return self.choice["token_ids"]


@dataclass
class Client:
    """Sends HTTP requests, and sends legs to workers directly."""

    fleet: Fleet
    http: httpx.AsyncClient
    tap: Tap
    driver: Driver

    async def ask(
        self, prompt: Sequence[int] | str, mode: str = "auto", endpoint: str = "streamed", **fields: Any
    ) -> HttpReply:
        """A greedy completion, asked for again, as clients do, while the router has no worker for it: on a busy machine it
        may miss a worker's reports for a moment. ``endpoint`` is a key of ``Fleet.endpoints``.
        """
        request = {**body([]), "prompt": prompt, "return_token_ids": True, **fields}
        url = f"{self.fleet.endpoints[endpoint]}/v1/completions"
        until_s = time.monotonic() + ANSWER_S_MAX
        while True:
            reply = await self.http.post(url, json=request, headers={"x-baton-mode": mode})
            if reply.status_code != SERVICE_UNAVAILABLE or time.monotonic() > until_s:
                break
            await asyncio.sleep(AGAIN_S)
        return HttpReply(reply.status_code, reply.headers.get("x-request-id", ""), reply.json())

    async def events(self, prompt: Sequence[int], mode: str = "auto", **fields: Any) -> list[dict[str, Any]]:
        """All events of a streamed greedy completion."""
        request = {**body(prompt), "return_token_ids": True, **fields, "stream": True}
        url = f"{self.fleet.endpoints['streamed']}/v1/completions"
        async with self.http.stream("POST", url, json=request, headers={"x-baton-mode": mode}) as reply:
            assert reply.status_code == 200, await reply.aread()
            lines = [line.removeprefix("data: ") async for line in reply.aiter_lines() if line]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    async def alone(self, prompt: Sequence[int], tokens: int = 16) -> list[int]:
        """Expected output tokens: those of one engine that fetches and reuses nothing."""
        return await self.driver.alone(PREFILL, prompt, tokens)


@asynccontextmanager
async def client_of(fleet: Fleet) -> AsyncIterator[Client]:
    """A client for one test, once all workers have sent a load report."""
    timeout = httpx.Timeout(ANSWER_S_MAX)
    async with (
        httpx.AsyncClient(timeout=timeout, trust_env=False) as http,
        Tap(fleet.nats.url) as tap,
        driving(tap) as driver,
    ):
        await tap.until(lambda: set(WORKERS) <= tap.loads.keys(), "all workers have sent a load report")
        yield Client(fleet, http, tap, driver)
