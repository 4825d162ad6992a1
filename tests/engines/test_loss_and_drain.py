"""How legs, engines and workers end. Runs last: it uses the shared workers up."""

from __future__ import annotations

import asyncio

import msgspec
import psutil
import pytest

from shared.contracts.channels import DRAIN, DRAINED, WORKER_RECORDS
from shared.contracts.failures import Reason
from shared.contracts.fleet_orders import DrainWorker
from shared.contracts.inference import FrameKind, LegKind
from shared.contracts.workers import WorkerPhase
from tests.engines.test_handover import completion, prompt_of
from tests.support.processes import freeze, quietest_cpu
from tests.support.worker_processes import GONE_S_MAX, READY_S_MAX, STOP_S_MAX, gone, handoff, start_worker

pytestmark = pytest.mark.vllm

LONG = {"max_tokens": 4000, "stream": True}
IDLE_CPU_MAX = 0.15
BLOCK = 32
SOME_TOKENS = 20


async def first_data(leg) -> None:
    """Until the leg has sent something for its client."""
    while not any(frame.data for frame in await leg.frames()):
        pass


@pytest.mark.parametrize("leased", [False, True], ids=["nothing leased", "leased"])
async def test_idle_engines_cost_almost_no_cpu(pair, router, leased):
    for worker in pair:
        await router.load_where(worker, lambda load: load.running == 0 and load.kv_tokens_used == 0)
    if leased:
        await router.leg(pair[0], LegKind.PREFILL, completion(prompt_of(300, seed=30)))
        await router.load_where(pair[0], lambda load: load.running == 0 and load.exchange.pinned_blocks > 0)
    processes = [psutil.Process(worker.process.pid) for worker in pair]
    processes += [child for worker in pair for child in worker.children()]

    assert await asyncio.to_thread(quietest_cpu, [processes], enough=IDLE_CPU_MAX) < IDLE_CPU_MAX


async def test_a_cancelled_leg_frees_its_blocks(pair, router):
    _prefill, decode = pair
    leg = await router.start(decode, LegKind.AGGREGATED, completion(prompt_of(300, seed=31), **LONG))
    await first_data(leg)

    leg.cancel()

    load = await router.load_where(decode, lambda load: load.legs == 0 and load.kv_tokens_used == 0)
    assert load.running == 0


async def test_a_leg_past_its_deadline_fails_and_is_aborted(pair, router):
    _prefill, decode = pair

    body = completion(prompt_of(300, seed=32), **{**LONG, "stream": False})  # A stream that has begun has no deadline.
    answer = await router.leg(decode, LegKind.AGGREGATED, body, deadline_s=0.5)

    assert answer.failure.reason is Reason.DEADLINE
    await router.load_where(decode, lambda load: load.kv_tokens_used == 0)


async def test_an_unread_offer_does_not_block_its_engine(pair, router):
    prefill, _decode = pair
    await router.leg(prefill, LegKind.PREFILL, completion(prompt_of(300, seed=33)))

    answer = await router.leg(prefill, LegKind.AGGREGATED, completion(prompt_of(30, seed=34)))

    assert len(answer.token_ids) == 24


async def test_lost_kv_is_recomputed_by_the_decode_engine(pair, router):
    prefill, decode = pair
    body = completion(prompt_of(300, seed=35))
    first = await router.leg(prefill, LegKind.PREFILL, body)
    lost = msgspec.structs.replace(first.report.kv.offer, worker_id="gone")

    second = await router.leg(decode, LegKind.DECODE, body, kv_transfer=msgspec.msgpack.encode(lost))
    alone = await router.leg(decode, LegKind.AGGREGATED, body)

    assert second.status == 200
    assert second.token_ids == alone.token_ids


async def test_a_draining_worker_finishes_legs_serves_offers_and_evacuates_its_cache(pair, router):
    prefill, decode = pair
    children = prefill.children()
    body, conversation = completion(prompt_of(300, seed=38)), completion(prompt_of(500, seed=39))
    its_own = await router.leg(prefill, LegKind.AGGREGATED, conversation)
    offered = await router.leg(prefill, LegKind.PREFILL, body)
    leg = await router.start(prefill, LegKind.AGGREGATED, completion(prompt_of(30, seed=36), stream=True))
    await first_data(leg)
    drained = asyncio.get_running_loop().create_future()
    await router.bus.subscribe(DRAINED, lambda told, _: drained.set_result(told), worker_id=prefill.worker_id)

    order = DrainWorker(worker_id=prefill.worker_id)
    assert not (await router.bus.ask(DRAIN, order, timeout_s=GONE_S_MAX)).refusal

    taken = await router.leg(decode, LegKind.DECODE, body, kv_transfer=handoff(offered.report))
    assert taken.report.received_tokens > 0
    kinds: list[FrameKind] = []
    while FrameKind.END not in kinds:
        kinds += [frame.kind for frame in await leg.frames()]
    assert await asyncio.to_thread(prefill.process.wait, STOP_S_MAX) == 0, prefill.log.read_text()
    assert await gone(children)
    records = await router.bus.key_value_store(WORKER_RECORDS)
    found = await records.get(prefill.worker_id)
    assert found is None or found.value is None
    told = await asyncio.wait_for(drained, GONE_S_MAX)
    assert (told.legs, told.legs_cut, told.prefixes_left) == (1, 0, 0), prefill.log.read_text() + decode.log.read_text()
    assert told.blocks >= its_own.report.prompt_tokens // BLOCK > 0
    assert told.bytes > 0
    assert "ordered to drain" in prefill.log.read_text(), "logs are not lost after vLLM has set up its loggers"
    elsewhere = await router.leg(decode, LegKind.AGGREGATED, conversation)
    assert elsewhere.token_ids == its_own.token_ids
    assert elsewhere.report.cached_tokens == elsewhere.report.kv.local_tokens
    assert elsewhere.report.prompt_tokens - BLOCK <= elsewhere.report.cached_tokens < elsewhere.report.prompt_tokens


async def test_a_dead_engine_fails_every_leg_and_ends_its_worker(pair, router):
    _prefill, decode = pair
    children = decode.children()
    streamed, whole = (
        asyncio.create_task(
            router.leg(decode, LegKind.AGGREGATED, completion(prompt_of(60, seed=37), max_tokens=4000, stream=stream))
        )
        for stream in (True, False)
    )
    load = await router.load_where(decode, lambda load: load.running == 2)
    generated = load.generation_tokens_total
    await router.load_where(decode, lambda load: load.generation_tokens_total >= generated + SOME_TOKENS)
    freeze(decode.engine_core().pid)
    stuck = asyncio.create_task(router.leg(decode, LegKind.AGGREGATED, completion(prompt_of(60, seed=38))))
    await router.load_where(decode, lambda load: load.waiting_tokens > 0)

    decode.engine_core().kill()

    failures = [(await leg).failure for leg in (streamed, whole, stuck)]
    assert [failure.reason for failure in failures] == [Reason.ENGINE_DEAD] * 3
    # Only the leg without a token may be what the engine died of.
    assert [failure.suspect for failure in failures] == [False, False, True]
    assert await asyncio.to_thread(decode.process.wait, STOP_S_MAX) != 0
    assert await gone(children)


async def test_sigterm_while_starting_ends_the_worker_and_its_children(pair, router, nats_url, run_dir):
    for worker in pair:
        worker.kill()
    worker = start_worker(nats_url, "w4", run_dir, cpu_cores="0")
    records = await router.bus.key_value_store(WORKER_RECORDS)
    try:
        async with asyncio.timeout(READY_S_MAX):
            async for change in records.watch():
                if change and change.key == "w4" and change.value:
                    assert change.value.phase is WorkerPhase.STARTING
                    break
            while len(worker.children()) < 2:
                await asyncio.sleep(0.1)  # processes appear without telling anyone
        children = worker.children()

        assert await asyncio.to_thread(worker.stop) == 0
        assert await gone(children)
    finally:
        worker.kill()
