"""Decoding while long prompts are computed; leases requested from idle and busy engines."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise

from bench.kv_bench_fleet import BenchFleet, Prompts
from shared.contracts.inference import LegKind

STREAMS, STREAM_TOKENS, STREAM_PROMPT = 4, 600, 64
LONG_PROMPT, LONG_EVERY_S = 2000, 2.5
LEASED_TOKENS = 100 * 32
IDLE_S = 5.0
HOLD_S = 30.0


def quantile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


@dataclass
class Gaps:
    """Seconds between tokens of all streams, and TTFT of the long prompts."""

    between_tokens: list[float] = field(default_factory=list)
    long_ttft: list[float] = field(default_factory=list)


async def stream(fleet: BenchFleet, prompt: list[int], tokens: int, mode: str) -> list[float]:
    """Instants of the request and of each event."""
    body = {"model": "baton-tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    came = [time.monotonic()]
    async with fleet.http.stream("POST", "/v1/completions", json=body, headers={"x-baton-mode": mode}) as said:
        assert said.status_code == 200, await said.aread()
        async for line in said.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                came.append(time.monotonic())
    return came


async def measure_interference(fleet: BenchFleet, mode: str, seconds: float) -> Gaps:
    """Streams run while a long prompt arrives every ``LONG_EVERY_S``, whether or not the last one has ended."""
    prompts, gaps = Prompts(5), Gaps()
    over = time.monotonic() + seconds

    async def go_on() -> None:
        while time.monotonic() < over:
            _asked, *came = await stream(fleet, prompts.new(STREAM_PROMPT), STREAM_TOKENS, mode)
            gaps.between_tokens += [later - earlier for earlier, later in pairwise(came)]

    async def one_long() -> None:
        asked_s, first, *_rest = await stream(fleet, prompts.new(LONG_PROMPT), 2, mode)
        gaps.long_ttft.append(first - asked_s)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(STREAMS):
            tasks.create_task(go_on())
        await asyncio.sleep(1.0)
        while time.monotonic() < over:
            tasks.create_task(one_long())
            await asyncio.sleep(LONG_EVERY_S)
    return gaps


async def measure_leases(fleet: BenchFleet, holder: str, prompt: list[int], times: int) -> list[float]:
    """Seconds from a lease request, over NATS, to its grant."""
    took = []
    for _ in range(times):
        begun_at = time.monotonic()
        grant = await fleet.driver.lease(holder, prompt, hold_s=HOLD_S)
        took.append(time.monotonic() - begun_at)
        assert grant.lease_id, grant
        await fleet.driver.release(grant)
        await asyncio.sleep(0.005)
    return took


async def leases_under_load(fleet: BenchFleet, holder: str, times: int) -> dict[str, list[float]]:
    """Of an idle engine, one that decodes four streams, and one that computes long prompts in sequence."""
    prompts = Prompts(6)
    prompt = prompts.new(LEASED_TOKENS)
    await fleet.driver.leg(holder, LegKind.AGGREGATED, prompt)
    found = {"idle": await measure_leases(fleet, holder, prompt, times)}
    long = {"max_tokens": 4000, "stream": True}
    legs = [
        await fleet.driver.start(holder, LegKind.AGGREGATED, prompts.new(64), fields=long, deadline_s=120.0)
        for _ in range(STREAMS)
    ]
    await fleet.tap.until(lambda: fleet.tap.loads[holder].running == STREAMS, "the streams run")
    found["decoding 4 streams"] = await measure_leases(fleet, holder, prompt, times)
    for leg in legs:
        leg.cancel()
    await fleet.tap.until_settled(holder)
    measuring = asyncio.create_task(measure_leases(fleet, holder, prompt, max(10, times // 10)))
    while not measuring.done():
        await fleet.driver.leg(holder, LegKind.AGGREGATED, prompts.new(LONG_PROMPT), fields={"max_tokens": 1})
    found["computing long prompts"] = await measuring
    await fleet.tap.until_settled(holder)
    return found


async def idle_cpu(fleet: BenchFleet, holder: str) -> dict[str, float]:
    """Idle CPU seconds per second of worker and engine, without and with pinned blocks."""
    prompt = Prompts(7).new(LEASED_TOKENS)
    await fleet.driver.leg(holder, LegKind.AGGREGATED, prompt)
    await fleet.tap.until_settled(holder)
    found = {"nothing pinned": await cpu_over(fleet, holder)}
    grant = await fleet.driver.lease(holder, prompt, hold_s=HOLD_S)
    found[f"{LEASED_TOKENS // 32} blocks pinned"] = await cpu_over(fleet, holder)
    await fleet.driver.release(grant)
    return found


async def cpu_over(fleet: BenchFleet, holder: str) -> float:
    await asyncio.sleep(1.0)
    before = fleet.cpu_s(holder)
    await asyncio.sleep(IDLE_S)
    return (fleet.cpu_s(holder) - before) / IDLE_S
