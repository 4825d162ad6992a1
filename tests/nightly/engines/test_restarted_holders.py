"""Readers of a prefill engine that dies and is started again, on real engines: for models of each kind, and drafters."""

from __future__ import annotations

import time

import pytest

from shared.contracts.inference import LegKind
from tests.engines.kv_pair import (
    DECODE,
    DRAFTS,
    PLAIN,
    PREFILL,
    Pair,
    kill,
    packed,
    pair_of,
    remaining_frames,
    settled_driver,
    start_following,
    tokens_of,
    until_decode_reads,
    until_first_token,
)
from tests.engines.test_kv_faults import PROMPT
from tests.support.kv_driver import TOKENS, Driver, transfer_report_of
from tests.support.prompts import random_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

SHORT_PROMPT = 201


pair, driver = pair_of("gemma-3", *PLAIN, *DRAFTS), settled_driver


async def test_readers_survive_a_prefill_engine_that_dies_and_its_restart(pair: Pair, driver: Driver):
    """Whether they have read, read, follow or come too late when it dies, and with what they knew of its former life."""
    read, reading, unread, before = (
        random_prompt(f"{when} its death", SHORT_PROMPT) for when in ("read at", "reading at", "unread at", "before")
    )
    followed = random_prompt("followed at its death", 1000)
    expected = [await driver.alone(PREFILL, prompt, 200) for prompt in (read, reading, unread)]
    expected_before, expected_followed = [await driver.alone(PREFILL, prompt) for prompt in (before, followed)]
    offers = [await driver.offered(PREFILL, prompt) for prompt in (read, reading, unread, before)]
    old_source = driver.source(PREFILL)
    long = {"fields": {"stream": True, "max_tokens": 200}}
    decoding = await driver.start(DECODE, LegKind.DECODE, read, kv_transfer=packed(offers[0]), **long)
    frames = await until_first_token(decoding)
    follower = await start_following(driver, followed) if pair.lends else None

    with pair.frozen_prefill_engine() as core:
        stuck = await driver.start(DECODE, LegKind.DECODE, reading, kv_transfer=packed(offers[1]), **long)
        await until_decode_reads(driver, 3 if follower else 2)
        kill(core)
        killed_at = time.monotonic()
        late = await driver.start(DECODE, LegKind.DECODE, unread, kv_transfer=packed(offers[2]), **long)
        answers = [
            await remaining_frames(decoding, frames),
            await remaining_frames(stuck),
            await remaining_frames(late),
        ]
        if follower:
            assert tokens_of(await remaining_frames(follower)) == expected_followed
    print(f"\nall answered {time.monotonic() - killed_at:.1f} s after the death")
    assert [tokens_of(frames) for frames in answers] == expected

    await pair.restart_prefill(driver.tap)

    stale = await driver.taken(DECODE, before, offers[3])
    asked = await driver.leg(DECODE, LegKind.DECODE, before[: -pair.model.block], kv_sources=[old_source])
    new = random_prompt("after its restart", PROMPT)
    fresh = await driver.taken(DECODE, new, await driver.offered(PREFILL, new))
    assert stale.token_ids == expected_before
    assert transfer_report_of(stale).fetched_tokens == 0
    assert len(asked.token_ids) == TOKENS
    assert fresh.token_ids == await driver.alone(PREFILL, new)
    assert transfer_report_of(fresh).recomputed_tokens <= pair.model.block
