"""Whatever breaks in the middle of a KV exchange between real engines: the tokens are those of an engine that computed
everything itself, or there is a clear error in time; and nothing stays pinned. Of the model's layers most have a window.
The nightly ``test_kv_faults_of_models.py`` has models of other kinds, ``test_restarted_holders.py`` a holder that dies.
"""

from __future__ import annotations

import asyncio
import time

import psutil
import pytest

from connector.groups import GroupPlan
from shared.bus.leg_inbox import LegFailed
from shared.contracts.channels import KV_GRANT
from shared.contracts.failures import Reason
from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import KvGroupKind
from tests.engines.kv_boundaries import handshake_of, left_out, prove_boundaries
from tests.engines.kv_forgeries import GARBLED, Garbled, forgeries, right
from tests.engines.kv_pair import (
    DECODE,
    EXPIRED_S_MAX,
    HALF_TOKENS,
    LEASE_S,
    LEG_S_MAX,
    PREFILL,
    VICTIM_TOKENS,
    Pair,
    driver_of,
    kill,
    packed,
    pair_of,
    remaining_frames,
    report_of,
    settled_driver,
    start_following,
    start_two_that_do_not_fit,
    tokens_of,
    until_decode_reads,
    until_first_token,
)
from tests.support.kv_driver import Driver, transfer_report_of
from tests.support.prompts import random_prompt
from tests.support.worker_processes import GONE_S_MAX, gone

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

PROMPT = 393
"""Tokens: some blocks of any model and a part of one; the decode engine holds four of them."""
LONG_PROMPT = 1283
"""Tokens: several chunks, and a part of a block."""
NATS_BACK_S_MAX = 60.0
LATE_S = 0.5
"""After the end of a lease. A frozen holder is let go on before the reader hangs up: UCX aborts a process that finds the
requests of somebody who has hung up.
"""


pair, driver = pair_of("gemma-3"), settled_driver


@pytest.fixture
def lending(pair: Pair) -> None:
    """For tests in which blocks are found by hash."""
    if not pair.lends:
        pytest.skip("the engine has no prefix cache (as vLLM's CPU backend with MLA), so it lends no blocks by hash")


async def test_a_handoff_over_tcp_works(pair: Pair, driver: Driver):
    prompt = random_prompt("handed over", LONG_PROMPT)

    answer = await driver.taken(DECODE, prompt, await driver.offered(PREFILL, prompt))

    assert answer.token_ids == await driver.alone(PREFILL, prompt)
    assert transfer_report_of(answer).recomputed_tokens == LONG_PROMPT % pair.model.block


@pytest.mark.usefixtures("lending")
async def test_a_followed_handoff_over_tcp_works(pair: Pair, driver: Driver):
    prompt = random_prompt("followed", LONG_PROMPT)

    following = asyncio.create_task(
        driver.leg(DECODE, LegKind.DECODE, prompt, kv_sources=[driver.source(PREFILL, follow=True)])
    )
    prefill = await driver.leg(PREFILL, LegKind.PREFILL, prompt, kv_offer=False)
    prefilled_at = time.monotonic()
    followed = await following

    assert followed.token_ids == await driver.alone(PREFILL, prompt)
    assert transfer_report_of(followed).recomputed_tokens == LONG_PROMPT % pair.model.block
    assert transfer_report_of(prefill).offer is None
    (read,) = transfer_report_of(followed).reads
    assert read.read_at < prefilled_at, "the first chunk is read before the last one is computed"


async def test_a_boundary_of_a_model_with_windows_is_handed_over(pair: Pair, driver: Driver):
    if not pair.model.family.windows:
        pytest.skip("its layers have no windows")
    assert pair.prefill.record is not None

    await prove_boundaries(driver, pair.prefill.record, KvGroupKind.WINDOW, [left_out])


async def test_blocks_whose_lease_ended_before_the_read_are_computed(driver: Driver):
    prompt = random_prompt("ended before", PROMPT)
    offer = await driver.offered(PREFILL, prompt)
    await driver.tap.until_settled(PREFILL, s_max=EXPIRED_S_MAX)
    assert time.monotonic() > offer.until_s - 0.5

    answer = await driver.taken(DECODE, prompt, offer)

    transfer_report = transfer_report_of(answer)
    assert answer.token_ids == await driver.alone(PREFILL, prompt)
    assert all(read.tokens == 0 or read.read_at > offer.until_s for read in transfer_report.reads), transfer_report


async def test_blocks_whose_lease_ends_during_the_read_are_not_used(pair: Pair, driver: Driver):
    prompt = random_prompt("ends during", PROMPT)
    expected = await driver.alone(PREFILL, prompt)
    offer = await driver.offered(PREFILL, prompt)

    with pair.frozen_prefill_engine():
        reading = asyncio.create_task(driver.taken(DECODE, prompt, offer, deadline_s=LEG_S_MAX))
        await until_decode_reads(driver, 1)
        await asyncio.sleep(offer.until_s - time.monotonic() + LATE_S)  # the lease's own time is what is waited for
    answer = await reading

    transfer_report = transfer_report_of(answer)
    print(
        f"\n{time.monotonic() - offer.until_s:.1f} s after the lease: {[read.failure for read in transfer_report.reads]}"
    )
    assert answer.token_ids == expected
    assert transfer_report.fetched_tokens == 0
    assert any(read.failure for read in transfer_report.reads)


async def test_a_corrupted_or_stale_grant_is_rejected(pair: Pair, driver: Driver):
    peer = await handshake_of(driver, PREFILL)
    plan = GroupPlan(peer.groups, peer.hash_block_size, peer.alignment)
    forges = forgeries(plan)
    prompts = {name: random_prompt(f"forged {name}", PROMPT) for name in forges}
    expected = {name: await driver.alone(PREFILL, prompt) for name, prompt in prompts.items()}

    with pair.frozen_prefill_engine():
        for name, forge in forges.items():
            known = len(driver.tap.leases)
            begun_at = time.monotonic()
            leg = await driver.start(
                DECODE, LegKind.DECODE, prompts[name], kv_sources=[driver.source(PREFILL)], deadline_s=LEG_S_MAX
            )
            ask = (await driver.tap.until(lambda known=known: driver.tap.leases[known:], "decode asks"))[0]
            true = right(ask, plan)
            assert plan.granted(true.groups, ask.have, true.boundary), "but for the forgery it would be taken"
            lie = forge(true, plan)
            await driver.bus.publish(GARBLED if isinstance(lie, Garbled) else KV_GRANT, lie)

            assert tokens_of(await remaining_frames(leg)) == expected[name], name
            print(f"\n{name}: computed after {time.monotonic() - begun_at:.1f} s", end="")


async def test_a_client_that_leaves_at_any_phase_leaves_nothing_behind(pair: Pair, driver: Driver):
    tap = driver.tap

    with pair.frozen_prefill_engine():  # A fast one would have computed the prompt before a load report tells of it.
        prefilling = await driver.start(PREFILL, LegKind.PREFILL, random_prompt("left while prefilling", 1900))
        await tap.until(lambda: tap.loads[PREFILL].waiting_tokens, "its engine has the prompt")
    prefilling.cancel()
    await tap.until_settled(PREFILL)

    offer = await driver.offered(PREFILL, random_prompt("left while reading", PROMPT))
    with pair.frozen_prefill_engine():
        asked = len(tap.leases)
        # After half a second without a grant they compute the prompt and answer: they must still be there with the third.
        asking, waiting = [
            await driver.start(
                DECODE,
                LegKind.DECODE,
                random_prompt(f"left while {phase}", PROMPT),
                kv_sources=[source],
                fields={"max_tokens": 400},
            )
            for phase, source in (("asking", driver.source(PREFILL)), ("waiting", driver.source(PREFILL, follow=True)))
        ]
        await tap.until(lambda: len(tap.leases) >= asked + 2, "both ask")
        reading = await driver.start(
            DECODE, LegKind.DECODE, random_prompt("left while reading", PROMPT), kv_transfer=packed(offer)
        )
        await until_decode_reads(driver, 3)
        for leg in (asking, waiting, reading):
            leg.cancel()
        await tap.until(lambda: not tap.loads[DECODE].legs, "the legs are over")
    await tap.until_settled(PREFILL, DECODE, s_max=0.9 * LEASE_S)

    decoding = await driver.start(
        DECODE, LegKind.DECODE, random_prompt("left while decoding", PROMPT), fields={"stream": True, "max_tokens": 900}
    )
    await until_first_token(decoding)
    decoding.cancel()
    await tap.until_settled(DECODE)


@pytest.mark.usefixtures("lending")
async def test_a_preempted_decode_request_fetches_again_and_computes_only_its_tail(pair: Pair, driver: Driver):
    first, second = random_prompt("hungry", HALF_TOKENS), random_prompt("preempted", HALF_TOKENS)
    expected = await driver.alone(PREFILL, second, VICTIM_TOKENS)

    hungry, victim = await start_two_that_do_not_fit(pair.decode, driver, first, second)
    await remaining_frames(hungry)
    frames = await remaining_frames(victim)
    _report, transfer_report = report_of(frames)

    print(f"\n{transfer_report}")
    assert tokens_of(frames) == expected
    assert transfer_report.preemptions >= 1
    assert transfer_report.refetched_tokens > 0
    assert transfer_report.reprefilled_tokens <= VICTIM_TOKENS + pair.model.block
    assert transfer_report.recomputed_tokens <= pair.model.block


async def test_a_preempted_request_below_its_threshold_is_bounced(pair: Pair, driver: Driver):
    first, second = random_prompt("hungrier", HALF_TOKENS), random_prompt("bounced", HALF_TOKENS)

    hungry, victim = await start_two_that_do_not_fit(pair.decode, driver, first, second, cache_hit_threshold=0.9)
    frames = await until_first_token(victim)
    with pair.frozen_prefill_engine():
        await remaining_frames(hungry)
        frames = await remaining_frames(victim, frames)

    report, transfer_report = report_of(frames)
    assert transfer_report.refused
    assert transfer_report.preemptions >= 1
    assert report.finish_reason == "cache_threshold"
    assert b'"cache_threshold"' in b"".join(frame.data for frame in frames)


async def test_a_handoff_goes_on_when_nats_comes_back(pair: Pair, driver: Driver):
    prompt, followed = random_prompt("offered without NATS", PROMPT), random_prompt("followed without NATS", PROMPT)
    expected = [await driver.alone(PREFILL, one) for one in (prompt, followed)]
    offer = await driver.offered(PREFILL, prompt)
    with pair.frozen_prefill_engine():
        asked = len(driver.tap.leases)
        lost = await driver.start(DECODE, LegKind.DECODE, followed, kv_sources=[driver.source(PREFILL, follow=True)])
        await driver.tap.until(lambda: driver.tap.leases[asked:], "decode follows")
        pair.nats.kill()
        with pytest.raises(LegFailed) as failed:
            await remaining_frames(lost)
        pair.nats.start()

    driver.tap.loads.clear()
    await driver.tap.until(lambda: {PREFILL, DECODE} <= driver.tap.loads.keys(), "both are heard", NATS_BACK_S_MAX)
    answer = await driver.taken(DECODE, prompt, offer)
    again = await driver.taken(DECODE, followed, await driver.offered(PREFILL, followed))

    assert failed.value.failure.reason is Reason.BUS_DOWN
    assert [answer.token_ids, again.token_ids] == expected
    assert transfer_report_of(again).recomputed_tokens <= pair.model.block


async def test_a_decode_engine_that_dies_leaves_nothing_pinned_on_prefill(pair: Pair):
    async with driver_of(pair) as driver:
        unread, decoding = random_prompt("unread by the dead", PROMPT), random_prompt("decoded by the dead", PROMPT)
        await driver.offered(PREFILL, unread)
        offer = await driver.offered(PREFILL, decoding)
        long = {"stream": True, "max_tokens": 900}
        legs = [await driver.start(DECODE, LegKind.DECODE, decoding, kv_transfer=packed(offer), fields=long)]
        await until_first_token(legs[0])
        if pair.lends:
            legs.append(await start_following(driver, random_prompt("followed by the dead", 1400)))
        kill(pair.decode.engine_core())

        for leg in legs:
            with pytest.raises(LegFailed) as failed:
                await remaining_frames(leg)
            assert failed.value.failure.reason in {Reason.ENGINE_DEAD, Reason.WORKER_LOST}
        await driver.tap.until_settled(PREFILL, s_max=EXPIRED_S_MAX)
        assert await driver.alone(PREFILL, unread)


async def test_a_killed_worker_takes_its_engine_with_it(pair: Pair):
    processes = [psutil.Process(pair.prefill.process.pid), *pair.prefill.children()]
    assert len(processes) > 1

    processes[0].kill()

    pair.prefill.process.wait(GONE_S_MAX)
    assert await gone(processes[1:])
