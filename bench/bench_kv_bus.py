"""Streamed handoffs between two hosts over a bus that is far away: what of its delay a request sees, with grants that
also go as NIXL's notifications, and without.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import httpx

from bench import silent_agent
from bench.bench_kv_handoff import STREAMED, D, Handoff, hand_off
from bench.handoffs import Handoffs
from bench.kv_bench_fleet import BenchFleet, Prompts
from bench.kv_bench_page import ms, table, with_interval
from tests.support.distant_workers import distant_workers
from tests.support.kv_driver import driving
from tests.support.kv_tap import Tap
from tests.support.nats_server import NatsServer
from tests.support.worker_processes import WorkerProcess

DELAYS_S = (0.0, 0.000_2, 0.001, 0.005)
"""Added to each way between a worker and the server, so twice to a message from one worker to another."""
NOTICED, BUS = "notices", "bus alone"
PREFILL = {NOTICED: "p", BUS: "q"}
"""Prefill workers of one host; they take turns."""
PROMPT_TOKENS = 2048
WARM_UPS = 5
Found = dict[tuple[float, str], list[Handoff]]


@asynccontextmanager
async def at(folder: Path, nats: NatsServer, workers: dict[str, WorkerProcess]) -> AsyncIterator[BenchFleet]:
    """The fleet of running workers, driven from beside their server."""
    async with Tap(nats.url) as tap, driving(tap) as driver, httpx.AsyncClient() as http:
        await tap.until(lambda: workers.keys() <= tap.loads.keys(), "all workers are heard")
        yield BenchFleet(folder, nats, workers, driver, http, Handoffs())


def workers_of(common: Mapping[str, str], engine_args: str) -> dict[str, dict[str, str]]:
    """The settings of a fleet."""
    prefill = {**common, "role": "prefill"}
    return {
        PREFILL[NOTICED]: {**prefill, "engine_args": engine_args},
        PREFILL[BUS]: {**prefill, "engine_args": f"{engine_args} {silent_agent.ENGINE_ARGS}"},
        D: {**common, "role": "decode", "engine_args": engine_args},
    }


def measure(common: Mapping[str, str], engine_args: str, times: int) -> Found:
    """All delays, with a fleet for each: workers choose the way of grants when they start."""
    found = Found()
    for delay_s in DELAYS_S:
        with (
            tempfile.TemporaryDirectory() as name,
            distant_workers(folder := Path(name), workers_of(common, engine_args), {D}, delay_s) as (nats, workers),
        ):
            found |= asyncio.run(measure_one(folder, nats, workers, delay_s, times))
    return found


async def measure_one(
    folder: Path, nats: NatsServer, workers: dict[str, WorkerProcess], delay_s: float, times: int
) -> Found:
    """Both ways, in turn."""
    async with at(folder, nats, workers) as fleet:
        return await measure_both(fleet, delay_s, times)


async def measure_both(fleet: BenchFleet, delay_s: float, times: int) -> Found:
    prompts, found = Prompts(5), Found()
    for _time in range(WARM_UPS):
        for how in PREFILL:
            await _one(fleet, prompts, how)
    for _time in range(times):
        for how in PREFILL:
            found.setdefault((delay_s, how), []).append(await _one(fleet, prompts, how))
    return found


async def _one(fleet: BenchFleet, prompts: Prompts, how: str) -> Handoff:
    handoff = await hand_off(fleet, prompts.new(PROMPT_TOKENS), STREAMED, PREFILL[how])
    await fleet.tap.until_settled(PREFILL[how], D)
    return handoff


def lines(found: Found, chunk: int, bytes_per_token: int) -> list[str]:
    """The part of the page."""
    times = len(next(iter(found.values())))
    size = chunk * bytes_per_token / 2**20
    return [
        "## Streamed handoffs where the bus is far away",
        "",
        f"Two network namespaces, NIXL over TCP between them. A relay adds the delay to each way between a worker and nats-server, so twice to a message from one worker to another. {times} prompts of {PROMPT_TOKENS} tokens for each row, those of a delay in turn; the last of {PROMPT_TOKENS // chunk} chunks has {size:.0f} MiB of KV. From the end of the prefill leg, as its router hears of it, which takes one delay: medians, with 95 % intervals.",
        "",
        *table(
            "delay of each way ms | grants | TTFT ms | exposed until the first token ms | until the last blocks are there ms | until the second token ms | tokens computed again",
            [row(*which, handoffs) for which, handoffs in found.items()],
        ),
    ]


def row(delay_s: float, how: str, handoffs: list[Handoff]) -> list[object]:
    there = [next(iter(one.stages.values())) for one in handoffs if one.stages]
    return [
        f"{delay_s * 1e3:g}",
        how,
        with_interval([one.ttft_s for one in handoffs], ".1f", 1e3),
        with_interval([one.exposed_s for one in handoffs], ".1f", 1e3),
        with_interval(there, ".1f", 1e3) if there else ms(float("nan")),
        with_interval([one.second_s for one in handoffs], ".1f", 1e3),
        f"{median(one.recomputed for one in handoffs):.0f}",
    ]
