"""Batches of requests of which some lose KV: what that costs them and the others, with and without a bound on what a
step computes again, and with vLLM's own connector.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from bench.bench_kv_handoff import LEG_S_MAX, TOKENS_OUT, Answered, D, P, answer
from bench.kv_bench_fleet import BenchFleet, Prompts
from bench.kv_bench_page import ms, table
from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import GROUP, GroupBlocks, KvOffer, pack_block_ids, unpack_block_ids
from tests.support.kv_driver import BLOCK, full_hashes

BOUND, FREE, UPSTREAM = "Baton", "Baton, not bounded", "upstream"
OURS, THEIRS = (BOUND, FREE), (UPSTREAM,)
"""Methods of one fleet; they take turns."""
NO_BOUND_S = LEG_S_MAX
"""A target for the time between tokens that no step reaches: nothing is bounded."""
BATCH, BATCH_TOKENS = 8, 16 * BLOCK
LOST = (0, 1, 2, 4, 8)
WARM_UPS = 3


@dataclass(frozen=True)
class Group:
    """Medians of the ready, or of the lost, requests of a batch. Seconds."""

    first_s: float
    second_s: float
    step_s: float
    """Between the tokens after the second one."""


@dataclass(frozen=True)
class Batch:
    ready: Group | None
    lost: Group | None
    computed: int
    """Prompt tokens computed on decode, all requests together."""


Found = dict[tuple[str, int], list[Batch]]
"""By method and number of requests that lost KV."""


async def measure(fleet: BenchFleet, ways: Sequence[str], times: int) -> Found:
    """So many batches of each kind, in turn; which of a batch's requests lose KV is drawn."""
    prompts, draw, found = Prompts(2), random.Random(2), Found()
    for _time in range(WARM_UPS):
        await lose_some(fleet, ways[0], set(), prompts)
    for _time in range(times):
        for lost in LOST:
            losing = set(draw.sample(range(BATCH), lost))
            for how in ways:
                found.setdefault((how, lost), []).append(await lose_some(fleet, how, losing, prompts))
    return found


async def lose_some(fleet: BenchFleet, how: str, losing: set[int], prompts: Prompts) -> Batch:
    """A batch whose requests come at once, with the KV of their prompts, but for what some of them lose."""
    batch = [prompts.new(BATCH_TOKENS + 1) for _ in range(BATCH)]
    handed_over = [await hand_over(fleet, how, prompt, loses=at in losing) for at, prompt in enumerate(batch)]
    fields = {"max_tokens": TOKENS_OUT, "stream": True, "ignore_eos": True}
    begun_at = time.monotonic()
    legs = [
        await fleet.driver.start(
            D,
            LegKind.DECODE,
            prompt,
            kv_transfer=kv,
            fields=fields,
            deadline_s=LEG_S_MAX,
            itl_target_s=NO_BOUND_S if how == FREE else 0.0,
        )
        for prompt, kv in zip(batch, handed_over, strict=True)
    ]
    ended = await asyncio.gather(*map(answer, legs))
    if how == UPSTREAM:
        await fleet.until_idle()
    else:
        await fleet.tap.until_settled(P, D, s_max=LEG_S_MAX)
    reports = [one.report for one in ended]
    return Batch(
        group([one for at, one in enumerate(ended) if at not in losing], begun_at),
        group([one for at, one in enumerate(ended) if at in losing], begun_at),
        sum(one.prompt_tokens - one.cached_tokens - one.received_tokens for one in reports),
    )


async def hand_over(fleet: BenchFleet, how: str, prompt: list[int], *, loses: bool) -> bytes:
    """What the decode leg gets of the prefill leg."""
    if how != UPSTREAM:
        offer = await fleet.driver.offered(P, prompt)
        return msgspec.msgpack.encode(half_lost(offer, prompt) if loses else offer)
    if loses:
        return b""
    leg = await fleet.driver.start(P, LegKind.PREFILL, prompt, deadline_s=LEG_S_MAX)
    return (await answer(leg)).report.kv_transfer


def half_lost(offer: KvOffer, prompt: Sequence[int]) -> KvOffer:
    """As if the second half of the blocks had not been granted."""
    ids = unpack_block_ids(offer.groups[GROUP].block_ids)
    kept = len(ids) // 2
    groups = [GroupBlocks(first=0, block_ids=pack_block_ids(ids[:kept]))]
    boundary = offer.boundary * kept // len(ids)
    return msgspec.structs.replace(offer, groups=groups, boundary=boundary, last_hash=full_hashes(prompt)[kept - 1])


def group(answered: Sequence[Answered], begun_at: float) -> Group | None:
    if not answered:
        return None
    return Group(
        median(one.first_at - begun_at for one in answered),
        median(one.second_at - begun_at for one in answered),
        median(one.step_s for one in answered),
    )


def lines(found: Found) -> list[str]:
    """The part of the page."""
    rows = [row(found, how, lost) for lost in LOST for how in (*OURS, *THEIRS)]
    times = len(found[BOUND, 0])
    return [
        "## Lost KV in a batch",
        "",
        f"{BATCH} requests of {BATCH_TOKENS} tokens, with {TOKENS_OUT} tokens of output each; those that lose KV are drawn. Times from the first request of the batch on:",
        f"medians of a batch's requests, and then of {times} batches. Baton: the second half of the blocks does not arrive, and is computed;",
        "beside ready requests without a target for the time between tokens a step computes so much of it that it takes",
        "15 % longer than a decode step. Not bounded: the same with a target that no step reaches. Upstream: vLLM's",
        "connector keeps no block of a transfer that fails, so the whole prompt is computed; the lost requests come without a",
        "transfer here, so that what the failure itself costs is not counted. Upstream's row with all 8 lost is what an engine",
        "does that computes all prompts of a batch again for one loss.",
        "",
        *table(
            "lost | method | ready: TTFT ms | second token ms | times no loss | between tokens ms | lost: TTFT ms | second token ms | between tokens ms | tokens computed",
            rows,
        ),
    ]


def row(found: Found, how: str, lost: int) -> list[object]:
    batches, without = found[how, lost], found[how, 0]
    ready, others = ([getattr(one, name) for one in batches] for name in ("ready", "lost"))
    base = median(one.ready.second_s for one in without if one.ready is not None)
    times = f"{median(one.second_s for one in ready) / base:.2f}" if None not in ready else ""
    computed = round(median(one.computed for one in batches))
    first, second, step = cells(ready)
    return [lost, how, first, second, times, step, *cells(others), computed]


def cells(groups: Sequence[Group | None]) -> list[str]:
    known = [one for one in groups if one is not None]
    if not known:
        return ["", "", ""]
    return [ms(median(getattr(one, name) for one in known)) for name in ("first_s", "second_s", "step_s")]
