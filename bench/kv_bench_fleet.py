"""Real engines for a measurement, each on its own core where there are two: NATS, workers, optionally a router."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from bench.handoffs import Handoffs
from tests.support.kv_driver import Driver, driving
from tests.support.kv_tap import Tap
from tests.support.nats_server import NatsServer, free_port
from tests.support.processes import service_process
from tests.support.worker_processes import WorkerProcess, start_worker, wait_ready

ROUTER_READY_S_MAX = 60.0
VOCABULARY = range(10, 3000)
IDLE_S_MAX, CHECK_S, IDLE_SHARE_MAX = 60.0, 0.2, 0.15
"""Idle engines use a few percent of a core."""


@dataclass
class BenchFleet:
    folder: Path
    nats: NatsServer
    workers: dict[str, WorkerProcess]
    driver: Driver
    http: httpx.AsyncClient
    """At the router, if there is one."""
    handoffs: Handoffs
    """What routers report."""

    @property
    def tap(self) -> Tap:
        return self.driver.tap

    def processes(self, worker_id: str) -> list[psutil.Process]:
        """The worker and its engine."""
        root = psutil.Process(self.workers[worker_id].process.pid)
        return [root, *root.children(recursive=True)]

    def cpu_s(self, worker_id: str) -> float:
        """CPU seconds of the worker and its engine."""
        times = [process.cpu_times() for process in self.processes(worker_id)]
        return float(sum(time.user + time.system for time in times))

    def stepping_s(self, worker_id: str) -> float:
        """CPU seconds of their main threads, which take an engine's steps. Others may poll for ever: one of UCX does,
        with CUDA.
        """
        threads = [(process.pid, thread) for process in self.processes(worker_id) for thread in process.threads()]
        return float(sum(thread.user_time + thread.system_time for pid, thread in threads if thread.id == pid))

    async def until_idle(self) -> None:
        """Wait until no worker computes: vLLM's connector keeps a prefill engine stepping for a while after a
        handoff, which would disturb a measurement on the same core.
        """
        deadline = time.monotonic() + IDLE_S_MAX
        while True:
            before = {worker_id: self.stepping_s(worker_id) for worker_id in self.workers}
            await asyncio.sleep(CHECK_S)
            used_s = {worker_id: self.stepping_s(worker_id) - begun_s for worker_id, begun_s in before.items()}
            if sum(used_s.values()) <= CHECK_S * IDLE_SHARE_MAX:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"not idle after {IDLE_S_MAX} s; CPU seconds in {CHECK_S} s: {used_s}")

    async def replace(self, worker_id: str, successor: str, **settings: str) -> None:
        """Stop one worker and start another in its place."""
        self.workers.pop(worker_id).stop()
        self.workers[successor] = start_worker(self.nats.url, successor, self.folder, **settings)
        await wait_ready(self.nats.url, [self.workers[successor]])
        await self.tap.until(lambda: successor in self.tap.loads, f"{successor} is heard")


@asynccontextmanager
async def bench_fleet(
    workers: Mapping[str, Mapping[str, str]],
    *,
    router: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    devices: Mapping[str, Mapping[str, str]] | None = None,
) -> AsyncIterator[BenchFleet]:
    """Workers by their ids, with their WORKER_* settings and more of an environment; a router with its own settings,
    unless None. ``devices``: more of the environment of each worker; without it each has a core of its own.
    """
    port = free_port()
    cores = sorted(os.sched_getaffinity(0))
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nats = stack.enter_context(NatsServer(folder, has_buckets=True))
        if router is not None:
            variables = {f"ROUTER_{name.upper()}": value for name, value in router.items()}
            stack.enter_context(
                service_process("router", folder, BATON_NATS_URL=nats.url, ROUTER_PORT=str(port), **variables)
            )
        running: dict[str, WorkerProcess] = {}
        stack.callback(lambda: [worker.kill() for worker in running.values()])
        for number, (name, settings) in enumerate(workers.items()):
            core = {"cpu_cores": str(cores[number % len(cores)])} if devices is None else {}
            variables = {**(environ or {}), **(devices[name] if devices is not None else {})}
            running[name] = start_worker(nats.url, name, folder, environ=variables, **{**core, **settings})
        await wait_ready(nats.url, list(running.values()))
        tap = await stack.enter_async_context(Tap(nats.url))
        driver = await stack.enter_async_context(driving(tap))
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120.0, trust_env=False)
        )
        await tap.until(lambda: running.keys() <= tap.loads.keys(), "all workers are heard")
        if router is not None:
            await router_ready(http, len(running))
        handoffs = Handoffs()
        await handoffs.open(tap.bus)
        yield BenchFleet(folder, nats, running, driver, http, handoffs)


async def router_ready(http: httpx.AsyncClient, workers: int) -> None:
    """Until the router knows the blocks of all workers."""
    deadline = time.monotonic() + ROUTER_READY_S_MAX
    while time.monotonic() < deadline:
        try:
            text = (await http.get("/metrics")).text
        except httpx.ConnectError:  # It is starting.
            text = ""
        if sum('state="exact"' in line and line.endswith(" 1.0") for line in text.splitlines()) == workers:
            return
        await asyncio.sleep(0.2)
    raise RuntimeError(f"the router did not know {workers} workers within {ROUTER_READY_S_MAX} s")


class Prompts:
    """New prompts."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def new(self, tokens: int) -> list[int]:
        return self._draw.choices(VOCABULARY, k=tokens)
