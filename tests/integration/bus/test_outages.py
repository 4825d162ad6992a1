"""The connection breaks and comes back."""

from __future__ import annotations

import asyncio

import pytest

from shared.bus.port import BusDown
from shared.contracts.channels import KV_EVENTS, KV_SNAPSHOT, START_LEG
from shared.contracts.kv_events import AskKvSnapshot, KvSnapshot
from tests.integration.bus.worlds import SOON_S, soon, until
from tests.support.builders import kv_batch, start_leg


async def test_while_the_bus_is_down_nothing_is_accepted_and_nothing_arrives_later(world):
    router, worker = await world.bus(), await world.bus()
    got = []
    await worker.subscribe(START_LEG, lambda leg, _: got.append(leg.leg_id))

    async with world.outage():
        with pytest.raises(BusDown):
            await soon(router.publish(START_LEG, start_leg("stale")))

    await router.publish(START_LEG, start_leg("fresh"))
    await until(lambda: got)
    assert got == ["fresh"]


async def test_losing_and_regaining_the_connection_is_reported(world):
    bus = await world.bus()
    told = []
    bus.on_disconnect(lambda: told.append("lost"))
    bus.on_reconnect(lambda: told.append("back"))

    async with world.outage():
        assert told == ["lost"]
        assert not bus.connected

    await until(lambda: told == ["lost", "back"])
    assert bus.connected
    assert bus.counts.reconnects == 1
    assert not bus.failed.done()


async def test_subscriptions_and_answers_work_again_after_an_outage(world):
    sender, receiver = await world.bus(), await world.bus()
    got = []
    await receiver.subscribe(KV_EVENTS, lambda batch, _: got.append(batch.seq))

    async def answer(_ask, _envelope):
        return KvSnapshot(worker_id="w1", epoch=1, seq=1, hashes=b"")

    await receiver.answer(KV_SNAPSHOT, answer)

    async with world.outage():
        pass

    await sender.publish(KV_EVENTS, kv_batch(1))
    await until(lambda: got == [1])
    await sender.ask(KV_SNAPSHOT, AskKvSnapshot(worker_id="w1", epoch=1), timeout_s=SOON_S)


async def test_what_is_subscribed_during_an_outage_is_heard_after_it(world):
    sender, receiver = await world.bus(), await world.bus()
    got = []

    async with world.outage():
        await soon(receiver.subscribe(KV_EVENTS, lambda batch, _: got.append(batch.seq)))

    await sender.publish(KV_EVENTS, kv_batch(1))
    await until(lambda: got == [1])


async def test_a_waiting_ask_fails_at_once_when_the_connection_breaks(world):
    asker, responder = await world.bus(), await world.bus()
    asked = asyncio.Event()

    async def answer(_ask, _envelope):
        asked.set()
        await asyncio.Event().wait()

    await responder.answer(KV_SNAPSHOT, answer)
    ask = asyncio.ensure_future(asker.ask(KV_SNAPSHOT, AskKvSnapshot(worker_id="w1", epoch=1), timeout_s=60.0))
    await soon(asked.wait())

    async with world.outage():
        with pytest.raises(BusDown):
            await soon(ask)


async def test_messages_missed_in_an_outage_are_reported_to_who_reads_in_batches(world):
    sender, receiver = await world.bus(), await world.bus()
    got, told = [], []
    await receiver.subscribe(
        KV_EVENTS, lambda batch, _: got.append(batch.seq), on_dropped=lambda: told.append(1), in_batches=True
    )

    async with world.outage():
        assert not told

    await until(lambda: told == [1])
    await sender.publish(KV_EVENTS, kv_batch(1))
    await until(lambda: got == [1])
    assert not receiver.failed.done()
