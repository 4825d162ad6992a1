"""The KV exchange between two real engines, driven over the bus."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from services.launcher.doctor.workers import SLOW_BYTES_PER_S
from shared.contracts.channels import KV_GRANT, KV_HANDSHAKE, KV_LEASE, WORKER_RECORDS
from shared.contracts.ids import LegId, WorkerId
from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import AskKvHandshake, KvExchangeState, KvGrant, KvSource, LeaseKv
from shared.contracts.workers import KvMemory, WorkerPhase
from tests.engines.test_handover import completion, prompt_of
from tests.support.hostile_handshakes import FORGERIES
from tests.support.worker_processes import handoff

pytestmark = pytest.mark.vllm

BLOCK = 32
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def adds_up(transfer_report) -> bool:
    return (
        transfer_report.local_tokens + transfer_report.fetched_tokens + transfer_report.recomputed_tokens
        == transfer_report.prompt_tokens
    )


def source(worker, **more) -> KvSource:
    return KvSource(worker_id=worker.worker_id, epoch=worker.record.epoch, **more)


async def exchange_state(router, worker) -> KvExchangeState:
    """As it is now."""
    return (await router.load_where(worker, lambda load: load.exchange is not None)).exchange


async def released(router, worker, before: KvExchangeState) -> None:
    """Until one more lease was given back and nothing more is leased than before."""
    await router.load_where(
        worker,
        lambda load: (
            load.exchange.leases_released_total > before.leases_released_total
            and load.exchange.leases <= before.leases
            and load.exchange.pinned_blocks <= before.pinned_blocks
        ),
    )


async def test_engines_tell_how_fast_they_read_each_other(pair, router):
    """Measured over shared memory: the one that was ready first has measured when the other one tested itself."""
    registry = await router.bus.key_value_store(WORKER_RECORDS)

    for reader, holder in (pair, reversed(pair)):
        (read,) = (await registry.get(reader.worker_id)).value.kv_reads
        assert (read.source_id, read.memory) == (holder.worker_id, KvMemory.CPU)
        assert SLOW_BYTES_PER_S[KvMemory.CPU] < read.bytes_per_s < 10**11


async def test_a_handoffs_transfer_report_adds_up_and_only_the_tail_is_computed(pair, router):
    before = await exchange_state(router, pair[0])

    first, second = await router.handed_over(*pair, completion(prompt_of(300, seed=701)))

    transfer_report = second.report.kv
    assert adds_up(first.report.kv)
    assert adds_up(transfer_report)
    assert transfer_report.prompt_tokens == second.report.prompt_tokens
    assert transfer_report.fetched_tokens == second.report.received_tokens > 0
    assert transfer_report.recomputed_tokens <= BLOCK
    (read,) = transfer_report.reads
    assert (read.worker_id, read.tokens, read.failure) == ("p1", transfer_report.fetched_tokens, "")
    assert second.report.received_bytes == read.bytes > 0
    await released(router, pair[0], before)


@pytest.mark.parametrize("is_near", [True, False], ids=["same machine", "other machine"])
async def test_grants_for_an_engine_on_the_same_machine_do_not_take_the_bus(pair, router, is_near):
    """Without the reader's socket, as on another machine, they do."""
    prefill, decode = pair
    asks: list[LeaseKv] = []
    grants: list[KvGrant] = []
    await router.bus.subscribe(KV_LEASE, lambda ask, _envelope: asks.append(ask))
    await router.bus.subscribe(KV_GRANT, lambda grant, _envelope: grants.append(grant))
    sources = [source(prefill, follow=True)]
    await router.leg(
        decode, LegKind.DECODE, completion(prompt_of(60, seed=770 + is_near)), kv_sources=[source(prefill)]
    )
    socket = Path(asks[-1].reply_to)
    away = socket.with_suffix(".away")
    grants.clear()
    body = completion(prompt_of(1500, seed=772 + is_near))
    if not is_near:
        socket.rename(away)
    try:
        _first, second = await asyncio.gather(
            router.leg(prefill, LegKind.PREFILL, body, kv_offer=False),
            router.leg(decode, LegKind.DECODE, body, kv_sources=sources),
        )
    finally:
        if not is_near:
            away.rename(socket)
    alone = await router.leg(prefill, LegKind.AGGREGATED, body)

    assert second.token_ids == alone.token_ids
    assert second.report.kv.recomputed_tokens <= BLOCK
    assert bool(grants) is not is_near


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_prompt_is_read_while_it_is_computed(pair, router, stream):
    prefill, decode = pair
    body = completion(prompt_of(1500, seed=702 + stream), stream=stream)
    if stream:
        body["stream_options"] = {"include_usage": True}
    before = await exchange_state(router, prefill)

    first, second = await asyncio.gather(
        router.leg(prefill, LegKind.PREFILL, body, kv_offer=False),
        router.leg(decode, LegKind.DECODE, body, kv_sources=[source(prefill, follow=True)]),
    )
    alone = await router.leg(prefill, LegKind.AGGREGATED, body)

    assert first.report.kv.offer is None
    assert second.token_ids == alone.token_ids
    assert second.report.kv.recomputed_tokens <= BLOCK
    assert second.report.kv.reads[0].followed
    usage = second.events()[-1]["usage"] if stream else second.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == first.report.cached_tokens
    await released(router, prefill, before)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("follows", [False, True], ids=["offered", "followed"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_usage_has_the_prefill_workers_cached_tokens_although_a_stop_string_ends_it(
    pair, router, path, follows, stream
):
    """The engine never hears of a stop string: its answer has no end to carry a report."""
    prefill, decode = pair
    text = prompt_of(400, seed=740 + 4 * (path == CHAT) + 2 * follows + stream)
    asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    body = {"model": "baton-tiny", **asked, "max_tokens": 24, "temperature": 0, "stop": list("aeio")}
    body |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    await router.leg(prefill, LegKind.AGGREGATED, body, path=path)

    if follows:
        leg_id = LegId(f"followed-{path == CHAT:d}-{stream:d}")
        sources = [source(prefill, follow=True, leg_id=leg_id)]
        first, second = await asyncio.gather(
            router.leg(prefill, LegKind.PREFILL, body, path=path, kv_offer=False, leg_id=leg_id),
            router.leg(decode, LegKind.DECODE, body, path=path, kv_sources=sources),
        )
    else:
        first, second = await router.handed_over(prefill, decode, body, path=path)

    assert second.status == 200, second.body
    usage = second.events()[-1]["usage"] if stream else second.json()["usage"]
    assert second.report.finish_reason != "length"
    assert usage["completion_tokens"] < 24
    assert first.report.cached_tokens >= 300
    # On a busy machine the grant of a followed prefill may come too late: then the decode engine computes the prompt.
    computed_here = follows and not second.report.received_tokens
    cached = second.report.cached_tokens if computed_here else first.report.cached_tokens
    assert usage["prompt_tokens_details"]["cached_tokens"] == cached


async def test_a_prefill_worker_reads_back_what_the_decode_worker_holds(pair, router):
    prefill, decode = pair
    body = completion(prompt_of(400, seed=704))
    await router.leg(decode, LegKind.AGGREGATED, body)
    before = await exchange_state(router, decode)

    first = await router.leg(prefill, LegKind.PREFILL, body, kv_sources=[source(decode)])

    assert first.report.kv.fetched_tokens > 0
    assert first.report.kv.recomputed_tokens <= BLOCK
    assert adds_up(first.report.kv)
    await released(router, decode, before)


async def test_an_offer_of_another_epoch_is_not_read(pair, router):
    prefill, decode = pair
    body = completion(prompt_of(300, seed=705))
    first = await router.leg(prefill, LegKind.PREFILL, body)
    other = msgspec.structs.replace(first.report.kv.offer, epoch=first.report.kv.offer.epoch + 1)

    second = await router.leg(decode, LegKind.DECODE, body, kv_transfer=msgspec.msgpack.encode(other))
    alone = await router.leg(decode, LegKind.AGGREGATED, body)

    assert second.report.received_tokens == 0
    assert second.token_ids == alone.token_ids


@pytest.mark.parametrize("garbage", [b"\xc1", b"{}"], ids=str)
async def test_an_unreadable_offer_costs_only_a_prefill(pair, router, garbage):
    body = completion(prompt_of(100, seed=706))

    second = await router.leg(pair[1], LegKind.DECODE, body, kv_transfer=garbage)

    assert len(second.token_ids) == 24


@pytest.mark.parametrize("kind", list(LegKind))
async def test_clients_neither_see_nor_set_connector_parameters(pair, router, kind):
    hostile = {"baton": "\xc1", "do_remote_prefill": True}
    body = completion(
        prompt_of(100, seed=707), kv_transfer_params=hostile, vllm_xargs={"kv_transfer_params": "x", "baton": "x"}
    )

    answer = await router.leg(pair[1], kind, body)

    assert (answer.status, answer.failure) == (200, None)
    assert answer.report.kv is not None
    assert b'baton"' not in answer.body.replace(b"baton-tiny", b"")
    if answer.body:
        assert answer.json()["kv_transfer_params"] is None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_transfer_report_of_several_prompts_is_their_sum(pair, router, stream):
    prompts = [prompt_of(100 + 50 * number, seed=710 + number) for number in range(3)]

    answer = await router.leg(pair[1], LegKind.AGGREGATED, completion(prompts, stream=stream))

    assert answer.report.kv.prompt_tokens == answer.report.prompt_tokens > 300
    assert adds_up(answer.report.kv)


async def test_handshakes_have_the_current_clock(pair, router):
    answers = [
        await router.bus.ask(
            KV_HANDSHAKE, AskKvHandshake(worker_id=worker.worker_id, reader_id=WorkerId("test")), timeout_s=5.0
        )
        for worker in pair
        for _again in range(2)
    ]

    assert [answer.worker_id for answer in answers] == ["p1", "p1", "d1", "d1"]
    assert answers[0].clock_s < answers[1].clock_s
    assert answers[0].fingerprint == answers[2].fingerprint == pair[0].record.fingerprint.key()


async def test_engines_outlive_the_handshakes_of_hostile_workers(pair, router):
    """Workers of the same fleet, each with a key of its own. Both engines connect to each of them."""
    prefill, decode = pair
    ask = AskKvHandshake(worker_id=prefill.worker_id, reader_id=WorkerId("test"))
    honest = await router.bus.ask(KV_HANDSHAKE, ask, timeout_s=5.0)
    registry = await router.bus.key_value_store(WORKER_RECORDS)
    cores = [worker.engine_core().pid for worker in pair]

    for name, (forge, _fault) in FORGERIES.items():
        evil = msgspec.structs.replace(forge(honest), worker_id=WorkerId(f"evil-{name}"), epoch=1)

        async def answer(_ask, _envelope, evil=evil):
            return evil

        await router.bus.answer(KV_HANDSHAKE, answer, worker_id=evil.worker_id)
        record = msgspec.structs.replace(prefill.record, worker_id=evil.worker_id, epoch=1, phase=WorkerPhase.PROBING)
        await registry.put(record)
    try:
        async with asyncio.timeout(120.0):
            for worker in pair:
                for name, (_forge, fault) in FORGERIES.items():
                    while not [
                        line for line in worker.log.read_text().splitlines() if f"evil-{name}" in line and fault in line
                    ]:
                        assert worker.process.poll() is None, f"{worker.worker_id} died"
                        await asyncio.sleep(0.1)
        body = completion(prompt_of(300, seed=720))
        offered = await router.leg(prefill, LegKind.PREFILL, body)
        taken = await router.leg(decode, LegKind.DECODE, body, kv_transfer=handoff(offered.report))
        alone = await router.leg(prefill, LegKind.AGGREGATED, body)
    finally:
        for name in FORGERIES:
            await registry.delete(f"evil-{name}")

    assert taken.token_ids == alone.token_ids
    assert taken.report.kv.fetched_tokens > 0
    assert [worker.engine_core().pid for worker in pair] == cores


async def test_an_unread_offer_is_released_when_its_decode_leg_ends(pair, router):
    prefill, decode = pair
    body = completion(prompt_of(300, seed=708))
    before = await exchange_state(router, prefill)
    first = await router.leg(prefill, LegKind.PREFILL, body)
    await router.load_where(prefill, lambda load: load.exchange.leases > before.leases)

    leg = await router.start(decode, LegKind.DECODE, body, kv_transfer=handoff(first.report))
    leg.cancel()

    await released(router, prefill, before)
