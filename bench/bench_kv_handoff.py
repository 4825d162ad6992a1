"""Cost of a handoff: streamed, offered, and with vLLM's connector.

A handoff's exposed time is from the end of the prefill leg, as seen by its router, to the first token of the decode
leg. With Baton's connector that is the prefill leg's token, and the decode engine's own work is seen in the second one.
With vLLM's connector the first token needs a step of the decode engine, which computes the prompt's tail.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from statistics import median
from typing import Any

import msgspec

from bench.kv_bench_fleet import BenchFleet, Prompts
from bench.plain_reads import PlainRead, PlainReader
from shared.contracts.ids import LegId
from shared.contracts.inference import FrameKind, LegKind, LegReport
from shared.contracts.kv_exchange import new_lease_id
from tests.support.pulled_legs import PulledLeg

P, D = "p", "d"
STREAMED, OFFERED, UPSTREAM = "streamed", "offered", "upstream"
AFTER = "until the second token"
"""Part of a handoff: the engine's next step, which computes the prompt's tail, and the way of its token."""
ORDERS = tuple(permutations((STREAMED, OFFERED, UPSTREAM)))
"""All orders in turn, so that none always follows the same other."""
LEG_S_MAX = 120.0
TOKENS_OUT = 10
"""The first two tokens, and eight decode steps whose mean is the engine's step."""
WARM_UPS, WARM_UP_TOKENS = 20, 2048
"""More than the KV memory holds, so that every page is resident before measuring."""


@dataclass(frozen=True)
class Handoff:
    """Seconds of one request."""

    ttft_s: float
    exposed_s: float
    second_s: float
    """From the end of the prefill leg to the second token."""
    step_s: float
    """The decode engine's mean step after the second token."""
    stages: dict[str, float]
    """``second_s`` in parts, in order; empty where the engine reports no times. A streamed handoff may have read
    everything before the prefill leg's end is known: its first part is then negative.
    """
    bytes: int
    read_s: float
    recomputed: int
    plain: PlainRead | None = None
    """A plain read of as many bytes right after it."""
    cached_ttft_s: float = 0.0
    """Of the same prompt and one more token right after it, with the whole prompt cached on the decode engine."""
    cached_recomputed: int = 0


def median_of(handoffs: Sequence[Handoff], part: Callable[[Handoff], float]) -> float:
    return median(map(part, handoffs))


@dataclass
class Answered:
    """How a leg was answered. Instants are monotonic seconds."""

    first_at: float
    """Its first token; without one, its end."""
    second_at: float
    step_s: float
    """Mean of the steps after the second token; 0.0 without more."""
    report: LegReport


async def answer(leg: PulledLeg) -> Answered:
    """Read a leg to its end. Raises LegFailed."""
    first_at = second_at = last_at = 0.0
    tokens = steps = 0
    async with asyncio.timeout(LEG_S_MAX):
        while True:
            for frame in await leg.frames():
                now = time.monotonic()
                if frame.token_ids:
                    steps += len(frame.token_ids) if second_at else 0
                    tokens += len(frame.token_ids)
                    first_at, last_at = first_at or now, now
                    second_at = second_at or (now if tokens > 1 else 0.0)
                if frame.kind is FrameKind.END:
                    assert frame.report is not None
                    step_s = (last_at - second_at) / steps if steps else 0.0
                    return Answered(first_at or now, second_at or now, step_s, frame.report)


async def hand_off(fleet: BenchFleet, prompt: list[int], how: str, holder: str = P) -> Handoff:
    """``holder``: the worker that computes the prompt."""
    fields = {"max_tokens": TOKENS_OUT, "stream": True, "ignore_eos": True}
    options: dict[str, Any] = {"fields": fields, "deadline_s": LEG_S_MAX}
    driver = fleet.driver
    before = fleet.tap.loads[D]
    begun_at = time.monotonic()
    if how == STREAMED:
        leg_id = LegId(new_lease_id())
        sources = [driver.source(holder, follow=True, leg_id=leg_id)]
        prefill = await driver.start(holder, LegKind.PREFILL, prompt, kv_offer=False, leg_id=leg_id, **options)
        decode = await driver.start(D, LegKind.DECODE, prompt, kv_sources=sources, **options)
        answering = asyncio.create_task(answer(decode))
        await answer(prefill)
        prefilled_at = time.monotonic()
        answered = await answering
    else:
        prefill = await driver.start(holder, LegKind.PREFILL, prompt, **options)
        made = (await answer(prefill)).report
        prefilled_at = time.monotonic()
        offer = msgspec.msgpack.encode(made.kv.offer) if made.kv else made.kv_transfer
        decode = await driver.start(D, LegKind.DECODE, prompt, kv_transfer=offer, **options)
        answered = await answer(decode)
    report = answered.report
    moved, read_s = await what_was_read(fleet, before, report)
    recomputed = report.prompt_tokens - report.cached_tokens - report.received_tokens
    return Handoff(
        answered.first_at - begun_at,
        answered.first_at - prefilled_at,
        answered.second_at - prefilled_at,
        answered.step_s,
        stages_of(report, prefilled_at, answered.second_at, how),
        moved,
        read_s,
        recomputed,
    )


def stages_of(report: LegReport, prefilled_at: float, second_at: float, how: str) -> dict[str, float]:
    """Parts of the time to the second token. Reader and benchmark run on one machine and share its monotonic clock."""
    if report.kv is None or not report.kv.reads or not report.kv.reads[0].ended_at:
        return {}
    read = report.kv.reads[0]
    if how == STREAMED:
        return {"until the last blocks are there": read.ended_at - prefilled_at, AFTER: second_at - read.ended_at}
    return {
        "until the decode engine's scheduler has it": read.granted_at - prefilled_at,
        "until the read begins": read.read_at - read.granted_at,
        "read": read.ended_at - read.read_at,
        AFTER: second_at - read.ended_at,
    }


async def what_was_read(fleet: BenchFleet, before: Any, report: LegReport) -> tuple[int, float]:
    """Bytes and seconds of the KV transfer report, or of the engine's counters where there is none."""
    if report.kv is not None:
        return sum(read.bytes for read in report.kv.reads), sum(read.read_s for read in report.kv.reads)
    loads = fleet.tap.loads
    await fleet.tap.until(lambda: loads[D].received_bytes_total > before.received_bytes_total, "decode has counted")
    after = loads[D]
    return (
        after.received_bytes_total - before.received_bytes_total,
        after.received_seconds_total - before.received_seconds_total,
    )


async def measure(
    fleets: Mapping[str, BenchFleet], lengths: Mapping[int, int], plain: PlainReader
) -> dict[tuple[int, str], list[Handoff]]:
    """Every length and method; methods alternate, so that noise affects all of them."""
    prompts, found = Prompts(1), dict[tuple[int, str], list[Handoff]]()
    for how in (OFFERED, UPSTREAM):
        for _time in range(WARM_UPS):
            await hand_off(fleets[how], prompts.new(WARM_UP_TOKENS), how)
    for length, times in lengths.items():
        for number in range(times):
            for how in ORDERS[number % len(ORDERS)]:
                handoff = await _one(fleets[how], prompts.new(length), how, plain)
                found.setdefault((length, how), []).append(handoff)
    return found


async def measure_alone(
    fleet: BenchFleet, lengths: Mapping[int, int], plain: PlainReader
) -> dict[tuple[int, str], list[Handoff]]:
    """Every length, offered and streamed in turn."""
    prompts, found = Prompts(3), dict[tuple[int, str], list[Handoff]]()
    for _time in range(WARM_UPS):
        await hand_off(fleet, prompts.new(WARM_UP_TOKENS), OFFERED)
    for length, times in lengths.items():
        for _time in range(times):
            for how in (OFFERED, STREAMED):
                prompt = prompts.new(length)
                handoff = await with_cached(fleet, prompt, await _one(fleet, prompt, how, plain))
                found.setdefault((length, how), []).append(handoff)
    return found


@dataclass(frozen=True)
class FirstStep:
    """Of a request whose prompt is cached, on an engine without Baton's connector. Seconds."""

    ttft_s: float
    step_s: float
    """In the engine, from scheduling to the first token."""


async def measure_first_steps(fleet: BenchFleet, lengths: Mapping[int, int]) -> dict[int, list[FirstStep]]:
    """Every length: a new prompt, and then the prompt and one more token."""
    prompts, found = Prompts(4), dict[int, list[FirstStep]]()
    for length, times in lengths.items():
        for _time in range(times + 1):
            prompt = prompts.new(length)
            await _ask(fleet, prompt)
            begun_at, answered = await _ask(fleet, [*prompt, prompt[0]])
            one = FirstStep(answered.first_at - begun_at, answered.report.prefill_s)
            found.setdefault(length, []).append(one)
        del found[length][0]  # It warms up.
    return found


async def _ask(fleet: BenchFleet, prompt: list[int]) -> tuple[float, Answered]:
    """One request to the decode worker alone, and when it began."""
    fields = {"max_tokens": TOKENS_OUT, "stream": True, "ignore_eos": True}
    begun_at = time.monotonic()
    leg = await fleet.driver.start(D, LegKind.AGGREGATED, prompt, fields=fields, deadline_s=LEG_S_MAX)
    answered = await answer(leg)
    if fleet.tap.loads[D].exchange is None:
        await fleet.until_idle()
    else:
        await fleet.tap.until_settled(D, s_max=LEG_S_MAX)
    return begun_at, answered


async def _one(fleet: BenchFleet, prompt: list[int], how: str, plain: PlainReader) -> Handoff:
    if how == UPSTREAM:
        handoff = await hand_off(fleet, prompt, how)
        await fleet.until_idle()
        return handoff
    if how == OFFERED:
        plain.begin()
    handoff = await hand_off(fleet, prompt, how)
    await fleet.tap.until_settled(P, D, s_max=LEG_S_MAX)
    if how == OFFERED:
        plain.end()
        handoff = replace(handoff, plain=plain.again(handoff.bytes))
    return handoff


async def with_cached(fleet: BenchFleet, prompt: list[int], handoff: Handoff) -> Handoff:
    """Adds the same request without a handoff. One more token, since vLLM computes a cached prompt's last block."""
    begun_at, answered = await _ask(fleet, [*prompt, prompt[0]])
    report = answered.report
    computed = report.prompt_tokens - report.cached_tokens - report.received_tokens
    return replace(handoff, cached_ttft_s=answered.first_at - begun_at, cached_recomputed=computed)
