"""A sender on a subject may use only the ids of that subject."""

from __future__ import annotations

import dataclasses

import pytest

from shared.bus.port import AskRefused
from shared.bus.receiver import BAD_MESSAGES_LOGGED_MAX
from shared.bus.wire import pack
from shared.contracts.channels import KV_EVENTS, KV_SNAPSHOT, LEADERSHIP, START_LEG
from shared.contracts.control import Leadership
from shared.contracts.failures import Reason
from shared.contracts.kv_events import AskKvSnapshot, KvSnapshot
from tests.integration.bus.worlds import SOON_S, soon, until
from tests.support.builders import kv_batch, start_leg

EPOCH = 1
FLOOD = 40
"""Messages of one who does not stop."""


async def test_a_message_whose_ids_differ_from_its_subject_is_dropped_and_counted(world):
    sender, receiver = await world.bus(), await world.bus()
    got = []
    await receiver.subscribe(KV_EVENTS, lambda batch, _: got.append(batch.seq))

    await world.raw("kv.w2.events", pack(kv_batch(1)))
    await until(lambda: receiver.counts.bad_messages == 1)
    await sender.publish(KV_EVENTS, kv_batch(2))

    await until(lambda: got)
    assert (got, receiver.counts.bad_messages) == ([2], 1)
    assert not receiver.failed.done()


async def test_a_handler_that_waits_is_spared_such_a_message_too(world):
    sender, receiver = await world.bus(), await world.bus()
    got = []

    async def handle(leg, _envelope):
        got.append(leg.leg_id)

    await receiver.subscribe(START_LEG, handle, worker_id="w1")

    await world.raw("leg.w1.start", pack(start_leg("strange", worker_id="w2")))
    await until(lambda: receiver.counts.bad_messages == 1)
    await sender.publish(START_LEG, start_leg("fine", worker_id="w1"))

    await until(lambda: got)
    assert got == ["fine"]


async def test_an_ask_whose_ids_differ_from_its_subject_is_refused(world):
    asker, responder = await world.bus(), await world.bus()

    async def answer(ask, _envelope):
        return KvSnapshot(worker_id=ask.worker_id, epoch=EPOCH, seq=1, hashes=b"")

    await responder.answer(KV_SNAPSHOT, answer, worker_id="w1")
    forged = dataclasses.replace(KV_SNAPSHOT, subject="kv.w1.snapshot.{epoch}")

    with pytest.raises(AskRefused) as refused:
        await soon(asker.ask(forged, AskKvSnapshot(worker_id="w2", epoch=EPOCH), timeout_s=SOON_S))

    assert refused.value.failure.reason is Reason.BAD_MESSAGE
    assert f"kv.w2.snapshot.{EPOCH}" in refused.value.failure.message
    assert responder.counts.bad_messages == 1


async def test_a_key_value_entry_under_another_key_is_ignored(world):
    await (await world.bus()).make_bucket(LEADERSHIP, ttl_s=None)
    forger = await (await world.bus()).key_value_store(dataclasses.replace(LEADERSHIP, subject="leaders.orchestrator"))
    reader_bus = await world.bus()
    reader = await reader_bus.key_value_store(LEADERSHIP)
    true = Leadership(role="planner", leader="a", term=1)

    await forger.put(Leadership(role="planner", leader="forged", term=9))
    await reader.put(true)

    assert [kept.value for kept in await soon(reader.all())] == [true]
    assert reader_bus.counts.bad_messages > 0


async def test_endless_invalid_messages_do_not_fill_the_log(world, caplog):
    receiver = await world.bus()
    await receiver.subscribe(KV_EVENTS, lambda _batch, _envelope: None)

    for _ in range(FLOOD):
        await world.raw("kv.w2.events", pack(kv_batch(1)))
    await until(lambda: receiver.counts.bad_messages == FLOOD)

    lines = [record for record in caplog.records if "bad message" in record.message]
    assert BAD_MESSAGES_LOGGED_MAX <= len(lines) <= BAD_MESSAGES_LOGGED_MAX + FLOOD.bit_length()


async def test_a_subject_that_was_right_before_is_checked_for_each_message(world):
    sender, receiver = await world.bus(), await world.bus()
    got = []
    await receiver.subscribe(KV_EVENTS, lambda batch, _: got.append((batch.worker_id, batch.seq)))

    await sender.publish(KV_EVENTS, kv_batch(1, worker_id="w2"))
    await until(lambda: got)
    await world.raw("kv.w2.events", pack(kv_batch(2)))
    await until(lambda: receiver.counts.bad_messages == 1)
    await sender.publish(KV_EVENTS, kv_batch(3, worker_id="w2"))

    await until(lambda: len(got) == 2)
    assert got == [("w2", 1), ("w2", 3)]
