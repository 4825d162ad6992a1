"""Grants between real engines on two hosts come as notices, ahead of a slow bus, and what breaks in the middle of a
followed prompt breaks nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from shared.contracts.channels import WORKER_RECORDS
from shared.contracts.ids import LegId
from shared.contracts.inference import FrameKind, LegKind
from shared.contracts.kv_exchange import KvTransferReport, new_lease_id
from tests.support.distant_workers import distant_workers
from tests.support.kv_driver import BLOCK, Driver, driving
from tests.support.kv_tap import Tap
from tests.support.nats_server import NatsServer
from tests.support.prompts import random_prompt
from tests.support.pulled_legs import PulledLeg
from tests.support.worker_processes import WorkerProcess

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

PREFILL, VICTIM, DECODE = "prefill", "victim", "decode"
DELAY_S = 0.08
"""More than anything else takes: what a grant brings earlier than twice this has not come over the bus. A holder has
half a second for its reply."""
TOKENS = 3000
CHUNKS = "--max-num-batched-tokens 64"
"""A prompt takes longer than the request for its blocks."""
LEASE_S = 10.0
LEG_S_MAX = 120.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NatsServer, dict[str, WorkerProcess]]]:
    common = {"max_model_len": "4096", "kv_lease_s": str(LEASE_S)}
    workers = {
        PREFILL: {**common, "role": "prefill", "engine_args": CHUNKS},
        VICTIM: {**common, "role": "prefill", "engine_args": CHUNKS},
        DECODE: {**common, "role": "decode"},
    }
    with distant_workers(tmp_path_factory.mktemp("hosts"), workers, {DECODE}, DELAY_S) as both:
        yield both


@pytest.fixture
async def driver(running: tuple[NatsServer, dict[str, WorkerProcess]]) -> AsyncIterator[Driver]:
    nats, workers = running
    async with Tap(nats.url) as tap, driving(tap) as driver:
        alive = [name for name, worker in workers.items() if worker.process.poll() is None]
        await tap.until(lambda: set(alive) <= tap.loads.keys(), "all workers are heard")
        yield driver


async def follow(driver: Driver, prompt: list[int], holder: str = PREFILL) -> tuple[PulledLeg, PulledLeg]:
    """Both legs of a streamed handoff, as a router starts them."""
    options = {"fields": {"max_tokens": 8, "stream": True}, "deadline_s": LEG_S_MAX}
    leg_id = LegId(new_lease_id())
    sources = [driver.source(holder, follow=True, leg_id=leg_id)]
    prefill = await driver.start(holder, LegKind.PREFILL, prompt, kv_offer=False, leg_id=leg_id, **options)
    return prefill, await driver.start(DECODE, LegKind.DECODE, prompt, kv_sources=sources, **options)


async def ended(leg: PulledLeg) -> tuple[list[int], KvTransferReport | None, float]:
    """Tokens and report of a leg, and when it had ended. Raises LegFailed."""
    tokens: list[int] = []
    async with asyncio.timeout(LEG_S_MAX):
        while True:
            for frame in await leg.frames():
                tokens += frame.token_ids
                if frame.kind is FrameKind.END:
                    return tokens, frame.report.kv if frame.report else None, time.monotonic()


async def until_reading(driver: Driver) -> None:
    """The decode engine has read a part of the prompt that is being computed."""
    before = driver.tap.exchange_state(DECODE).read_bytes_total
    await driver.tap.until(
        lambda: driver.tap.exchange_state(DECODE).read_bytes_total > before, "a part is read", LEG_S_MAX
    )


async def test_the_last_grant_comes_ahead_of_the_bus(driver: Driver):
    prompt = random_prompt("ahead", TOKENS)
    expected = await driver.alone(DECODE, prompt, 8)
    prefill, decode = await follow(driver, prompt)
    _tokens, _report, prefilled_at = await ended(prefill)  # Heard of after one delay.

    tokens, report, _at = await ended(decode)

    assert tokens == expected
    assert report is not None
    assert report.first_token_received
    assert report.recomputed_tokens == TOKENS % BLOCK
    (read,) = report.reads
    assert (read.failure, read.tokens) == ("", TOKENS // BLOCK * BLOCK)
    assert read.ended_at < prefilled_at + DELAY_S, "the bus brought the last grant"
    await driver.tap.until_settled(PREFILL, DECODE)


async def test_the_self_test_measures_both_ways(driver: Driver):
    registry = await driver.tap.bus.key_value_store(WORKER_RECORDS)
    entry = await registry.get(DECODE)
    assert entry is not None
    assert entry.value is not None

    measured = [one for one in entry.value.kv_reads if one.notice_s]

    assert measured, entry.value.kv_reads
    for one in measured:
        assert 2 * DELAY_S <= one.notice_s < 4 * DELAY_S <= one.bus_s


async def test_a_reader_that_leaves_in_the_middle_leaves_nothing_leased(driver: Driver):
    prompt = random_prompt("left", TOKENS)
    prefill, decode = await follow(driver, prompt)
    await until_reading(driver)
    decode.cancel()

    await ended(prefill)

    await driver.tap.until_settled(PREFILL, DECODE)
    next_prompt = random_prompt("after the one that left", TOKENS)
    expected = await driver.alone(DECODE, next_prompt, 8)
    _prefill, decode = await follow(driver, next_prompt)
    assert (await ended(decode))[0] == expected


async def test_a_prompt_whose_holder_dies_in_the_middle_is_computed(
    driver: Driver, running: tuple[NatsServer, dict[str, WorkerProcess]]
):
    prompt = random_prompt("lost", TOKENS)
    expected = await driver.alone(DECODE, prompt, 8)
    prefill, decode = await follow(driver, prompt, VICTIM)
    await until_reading(driver)
    running[1][VICTIM].kill()
    prefill.cancel()

    tokens, report, _at = await ended(decode)

    assert tokens == expected
    assert report is not None
    assert report.recomputed_tokens > TOKENS % BLOCK
    await driver.tap.until_settled(DECODE, s_max=LEG_S_MAX)


async def test_a_reader_that_dies_in_the_middle_leaves_nothing_leased(
    driver: Driver, running: tuple[NatsServer, dict[str, WorkerProcess]]
):
    prefill, decode = await follow(driver, random_prompt("its reader is lost", TOKENS))
    await until_reading(driver)
    running[1][DECODE].kill()

    await ended(prefill)

    decode.cancel()
    await driver.tap.until_settled(PREFILL, s_max=LEG_S_MAX)
