"""Cost of a handoff: streamed, offered, and with vLLM's connector; and of lost blocks in a batch.

A handoff's exposed time is from the end of the prefill leg, as seen by its router, to the first token of the decode
leg. It includes computing the prompt's tail, with every connector.
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
from shared.bus.leg_inbox import Leg
from shared.contracts.inference import FrameKind, LegKind, LegReport
from shared.contracts.kv_exchange import KvOffer, pack_block_ids, unpack_block_ids
from tests.support.kv_driver import BLOCK, full_hashes

P, D = "p", "d"
STREAMED, OFFERED, UPSTREAM = "streamed", "offered", "upstream"
ORDERS = tuple(permutations((STREAMED, OFFERED, UPSTREAM)))
"""All orders in turn, so that none always follows the same other."""
LEG_S_MAX = 120.0
WARM_UPS, WARM_UP_TOKENS = 20, 2048
"""More than the KV memory holds, so that every page is resident before measuring."""
BATCH, BATCH_TOKENS = 8, 16 * BLOCK
LOST = (0, 1, 2, 4, 8)


@dataclass(frozen=True)
class Handoff:
    """Seconds of one request."""

    ttft_s: float
    exposed_s: float
    bytes: int
    read_s: float
    recomputed: int
    plain: PlainRead | None = None
    """A plain read of as many bytes right after it."""


def median_of(handoffs: Sequence[Handoff], part: Callable[[Handoff], float]) -> float:
    return median(map(part, handoffs))


async def first_token(leg: Leg) -> tuple[float, LegReport]:
    """Instant of the first token and the leg's report. Raises LegFailed."""
    came_at = 0.0
    async with asyncio.timeout(LEG_S_MAX):
        while True:
            for frame in await leg.frames():
                if frame.kind is FrameKind.DATA and not came_at:
                    came_at = time.monotonic()
                if frame.kind is FrameKind.END:
                    assert frame.report is not None
                    return came_at or time.monotonic(), frame.report


async def hand_off(fleet: BenchFleet, prompt: list[int], how: str) -> Handoff:
    """Hand one request over."""
    fields = {"max_tokens": 2, "stream": True}
    options: dict[str, Any] = {"fields": fields, "deadline_s": LEG_S_MAX}
    driver = fleet.driver
    before = fleet.tap.loads[D]
    begun_at = time.monotonic()
    if how == STREAMED:
        sources = [driver.source(P, follow=True)]
        prefill = await driver.start(P, LegKind.PREFILL, prompt, kv_offer=False, **options)
        decode = await driver.start(D, LegKind.DECODE, prompt, kv_sources=sources, **options)
        answering = asyncio.create_task(first_token(decode))
        await first_token(prefill)
        prefilled_at = time.monotonic()
        answered_at, report = await answering
    else:
        prefill = await driver.start(P, LegKind.PREFILL, prompt, **options)
        _at, made = await first_token(prefill)
        prefilled_at = time.monotonic()
        offer = msgspec.msgpack.encode(made.kv.offer) if made.kv else made.kv_transfer
        decode = await driver.start(D, LegKind.DECODE, prompt, kv_transfer=offer, **options)
        answered_at, report = await first_token(decode)
    moved, read_s = await what_was_read(fleet, before, report)
    recomputed = report.prompt_tokens - report.cached_tokens - report.received_tokens
    return Handoff(answered_at - begun_at, answered_at - prefilled_at, moved, read_s, recomputed)


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


async def measure_offered(
    fleet: BenchFleet, lengths: Mapping[int, int], plain: PlainReader
) -> dict[int, list[Handoff]]:
    """Every length, offered."""
    prompts = Prompts(3)
    for _time in range(WARM_UPS):
        await hand_off(fleet, prompts.new(WARM_UP_TOKENS), OFFERED)
    return {
        length: [await _one(fleet, prompts.new(length), OFFERED, plain) for _time in range(times)]
        for length, times in lengths.items()
    }


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


def half_lost(offer: KvOffer, prompt: Sequence[int]) -> KvOffer:
    """As if the second half of the blocks had not been granted."""
    ids = unpack_block_ids(offer.block_ids)
    kept = len(ids) // 2
    return msgspec.structs.replace(offer, block_ids=pack_block_ids(ids[:kept]), last_hash=full_hashes(prompt)[kept - 1])


@dataclass(frozen=True)
class Batch:
    """Requests of one decode batch; milliseconds to first token."""

    lost: int
    intact_ms: float
    lost_ms: float
    recomputed: int
    """Tokens computed on decode, all requests together."""


async def lose_some(fleet: BenchFleet, lost: int, prompts: Prompts) -> Batch:
    """A batch in which some requests miss half of their blocks."""
    batch = [prompts.new(BATCH_TOKENS + 1) for _ in range(BATCH)]
    offers = [await fleet.driver.offered(P, prompt) for prompt in batch]
    offers[:lost] = [half_lost(offer, prompt) for offer, prompt in zip(offers[:lost], batch, strict=False)]
    begun_at = time.monotonic()
    legs = [
        await fleet.driver.start(
            D,
            LegKind.DECODE,
            prompt,
            kv_transfer=msgspec.msgpack.encode(offer),
            fields={"max_tokens": 2, "stream": True},
        )
        for prompt, offer in zip(batch, offers, strict=True)
    ]
    ended = await asyncio.gather(*map(first_token, legs))
    waits = [(at - begun_at) * 1e3 for at, _report in ended]
    transfer_reports = [report.kv for _at, report in ended if report.kv is not None]
    assert len(transfer_reports) == BATCH
    return Batch(
        lost,
        median(waits[lost:]) if lost < BATCH else float("nan"),
        median(waits[:lost]) if lost else float("nan"),
        sum(transfer_report.recomputed_tokens for transfer_report in transfer_reports),
    )


async def measure_batches(fleet: BenchFleet, times: int) -> list[Batch]:
    """Medians over several batches of each kind."""
    prompts, rows = Prompts(2), []
    for lost in LOST:
        batches = [await lose_some(fleet, lost, prompts) for _ in range(times)]
        rows.append(
            Batch(
                lost,
                median(batch.intact_ms for batch in batches),
                median(batch.lost_ms for batch in batches),
                round(median(batch.recomputed for batch in batches)),
            )
        )
        await fleet.tap.until_settled(P, D, s_max=LEG_S_MAX)
    return rows
