"""Orders about KV to an engine with each leg, and the worker's report of it."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from services.worker.legs.body import KvPolicy, moves_kv
from shared.bus.port import AskRefused
from shared.contracts.channels import KV_FETCH
from shared.contracts.failures import Reason
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import LegKind, StartLeg
from shared.contracts.kv_exchange import FetchKv, KvOffer, KvSource, KvTransferReport, LegOrder
from tests.support.kv_messages import one_group
from tests.unit.worker.fakes import WAIT_S_MAX, running_worker
from tests.unit.worker.kv_exchange.fakes import HASH, FakeExchange, exchange_state

OFFER = KvOffer(
    worker_id=WorkerId("p1"), epoch=Epoch(1), lease_id="l1", groups=one_group([0]), last_hash=HASH, until_s=9.0
)
PACKED = msgspec.msgpack.encode(OFFER)
DEFAULTS = KvPolicy()
SOURCE = KvSource(worker_id=WorkerId("d2"), epoch=Epoch(1))


def start(kind: LegKind, **more) -> StartLeg:
    fields = {"worker_id": "w1", "router_id": "r1", "request_id": "q", "leg_id": "l", "deadline_s": 60.0, **more}
    return StartLeg(kind=kind, path="/v1/completions", body=b"{}", **fields)


def order(kind: LegKind, policy: KvPolicy = DEFAULTS, *, is_plain: bool = True, can_refuse: bool = True, **more):
    return policy.order(start(kind, **more), is_plain=is_plain, can_refuse=can_refuse)


def test_a_prefill_leg_offers_its_kv_unless_it_is_followed():
    assert order(LegKind.PREFILL).offer
    assert not order(LegKind.PREFILL, kv_offer=False).offer
    assert not order(LegKind.DECODE).offer


def test_the_engine_learns_the_id_of_a_prefill_leg_that_readers_may_follow():
    assert order(LegKind.PREFILL, kv_offer=False).leg_id == "l"
    assert not order(LegKind.DECODE).leg_id
    assert not order(LegKind.PREFILL, is_plain=False).leg_id


def test_a_decode_leg_takes_the_prefill_legs_offer():
    assert order(LegKind.DECODE, kv_transfer=PACKED).take == OFFER


@pytest.mark.parametrize("garbage", [b"\xc1", b'{"do_remote_prefill":true}', PACKED[:-3], b"\x81\xa1\xff\x01"])
def test_an_unreadable_offer_is_ignored(garbage):
    assert order(LegKind.DECODE, kv_transfer=garbage).take is None


@pytest.mark.parametrize(
    ("kind", "more", "recomputes"),
    [
        (LegKind.DECODE, {"kv_transfer": PACKED}, True),
        (LegKind.DECODE, {}, True),
        (LegKind.AGGREGATED, {"resume": b""}, True),
        (LegKind.AGGREGATED, {"kv_sources": [SOURCE]}, False),
        (LegKind.PREFILL, {}, False),
    ],
    ids=str,
)
def test_what_another_worker_has_computed_is_a_recompute(kind, more, recomputes):
    assert order(kind, **more).recomputes is recomputes


def test_the_engine_learns_the_target_for_the_time_between_tokens():
    assert order(LegKind.DECODE, itl_target_s=0.05).itl_target_s == 0.05


def test_no_kv_is_moved_for_a_request_of_several_sequences():
    moved = order(LegKind.DECODE, is_plain=False, kv_transfer=PACKED, kv_sources=[SOURCE])

    assert (moved.take, moved.sources, moved.offer) == (None, [], False)


def test_a_request_overrides_the_workers_kv_policy():
    policy = KvPolicy(cache_hit_threshold=0.8, fetch_min_tokens=64)

    assert order(LegKind.DECODE, policy).cache_hit_threshold == 0.8
    assert order(LegKind.DECODE, policy).fetch_min_tokens == 64
    told = order(LegKind.DECODE, policy, cache_hit_threshold=0.0, kv_fetch_min_tokens=0)
    assert (told.cache_hit_threshold, told.fetch_min_tokens) == (0.0, 0)


def test_prefill_legs_and_other_paths_are_exempt_from_the_threshold():
    policy = KvPolicy(cache_hit_threshold=0.8)

    assert order(LegKind.PREFILL, policy, cache_hit_threshold=0.9).cache_hit_threshold == 0.0
    assert order(LegKind.AGGREGATED, policy, can_refuse=False).cache_hit_threshold == 0.0
    assert order(LegKind.AGGREGATED, policy, is_plain=False).cache_hit_threshold == 0.8


def test_a_resumed_stream_is_exempt_from_the_threshold():
    """Its client has had some of it: an end with ``cache_threshold`` would be taken for the answer's."""
    assert order(LegKind.AGGREGATED, KvPolicy(cache_hit_threshold=0.8), resume=b"").cache_hit_threshold == 0.0


def test_the_wait_for_kv_is_bounded_by_the_legs_deadline():
    assert order(LegKind.DECODE, deadline_s=2.0).wait_s_max == 2.0
    assert order(LegKind.DECODE, deadline_s=600.0).wait_s_max == LegOrder().wait_s_max


def test_only_bodies_of_legs_that_move_kv_are_parsed():
    assert moves_kv(start(LegKind.PREFILL))
    assert moves_kv(start(LegKind.DECODE, kv_transfer=PACKED))
    assert moves_kv(start(LegKind.AGGREGATED, kv_sources=[SOURCE]))
    assert not moves_kv(start(LegKind.AGGREGATED))
    assert not moves_kv(start(LegKind.DECODE))


async def test_orders_travel_beside_an_unchanged_body():
    body = b'{ "model" : "m", "temperature": 1.0e0 }'
    async with running_worker(FakeExchange("w1")) as worker:
        await worker.read(await worker.leg(LegKind.PREFILL, body=body))
        await worker.read(await worker.leg(LegKind.DECODE, body=body, kv_transfer=PACKED, kv_sources=[SOURCE]))

        assert worker.engine.bodies == [body, body]
        assert worker.engine.orders == [
            LegOrder(leg_id="l1", offer=True, offer_id="l1", fetch_min_tokens=64, wait_s_max=5.0),
            LegOrder(take=OFFER, sources=[SOURCE], fetch_min_tokens=64, wait_s_max=5.0, recomputes=True),
        ]


async def test_a_clients_kv_parameters_do_not_reach_the_engine():
    async with running_worker(FakeExchange("w1")) as worker:
        await worker.read(await worker.leg(body={"kv_transfer_params": {"baton": "x"}, "prompt": "y"}))

        assert worker.engine.bodies == [b'{"prompt": "y"}'.replace(b": ", b":")]


async def test_the_report_has_the_source_of_the_prompts_kv():
    async with running_worker(FakeExchange("w1")) as worker:
        worker.engine.transfer_report = KvTransferReport(
            prompt_tokens=64, fetched_tokens=32, recomputed_tokens=32, offer=OFFER
        )

        frames, failure = await worker.read(await worker.leg(LegKind.PREFILL))

        assert failure is None
        assert frames[-1].report.kv == worker.engine.transfer_report
        assert frames[-1].report.kv_transfer == b""


async def test_a_draining_worker_waits_until_its_leased_blocks_are_read():
    exchange = FakeExchange("w1")
    async with running_worker(exchange) as worker:
        exchange.tell(state=exchange_state(pinned_blocks=3, next_expiry_s=time.monotonic() + 60.0))
        worker.service.stopping.set()
        while worker.service.phase != "draining":
            await asyncio.sleep(0)
        for _turn in range(20):
            await asyncio.sleep(0)
        assert not any(call.release_all for call in exchange.calls)
        fetch = FetchKv(worker_id="w1", sender_id="w2", hashes=bytes(32), sources=[], deadline_s=1.0)
        with pytest.raises(AskRefused) as refused:
            await worker.bus.ask(KV_FETCH, fetch, timeout_s=WAIT_S_MAX)
        assert refused.value.failure.reason is Reason.WORKER_DRAINING

        exchange.tell(state=exchange_state())

        assert await asyncio.wait_for(worker.exit, WAIT_S_MAX) == 0
        assert exchange.calls[-1].release_all
        assert worker.engine.closed
