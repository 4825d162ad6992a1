"""Publish and subscribe."""

from __future__ import annotations

import asyncio

import pytest

from shared.bus.port import BusDown, MessageTooLarge, NoResponders
from shared.contracts.channels import KV_EVENTS, KV_SNAPSHOT, LOAD, START_LEG
from shared.contracts.kv_events import AskKvSnapshot
from tests.integration.bus.worlds import FRAME_BUDGET_BYTES, soon, until
from tests.support.builders import kv_batch, start_leg
from tests.support.fleet_builders import load


async def test_messages_of_one_sender_arrive_in_order_with_their_headers(world):
    sender, receiver = await world.bus(), await world.bus()
    got = []
    await receiver.subscribe(KV_EVENTS, lambda batch, envelope: got.append((batch.seq, dict(envelope.headers))))

    for seq in range(100):
        await sender.publish(KV_EVENTS, kv_batch(seq), headers={"traceparent": f"00-{seq}"})

    await until(lambda: len(got) == 100)
    assert got == [(seq, {"traceparent": f"00-{seq}"}) for seq in range(100)]


async def test_what_was_held_back_arrives_in_order_with_its_headers(world):
    sender, receiver = await world.bus(), await world.bus()
    got = []
    await receiver.subscribe(KV_EVENTS, lambda batch, envelope: got.append((batch.seq, dict(envelope.headers))))
    await sender.publish(KV_EVENTS, kv_batch(0))

    sender.hold()
    held = [
        sender.publish_now(KV_EVENTS, kv_batch(seq), headers={"a": str(seq)} if seq == 2 else None) for seq in (1, 2)
    ]
    sender.release()
    await sender.publish(KV_EVENTS, kv_batch(3))

    await until(lambda: len(got) == 4)
    assert got == [(0, {}), (1, {}), (2, {"a": "2"}), (3, {})]
    assert held == [True, True]


async def test_a_fixed_id_narrows_a_subscription_and_no_id_widens_it(world):
    sender, receiver = await world.bus(), await world.bus()
    one, all_of_them = [], []
    await receiver.subscribe(KV_EVENTS, lambda batch, _: one.append(batch.worker_id), worker_id="w1")
    await receiver.subscribe(KV_EVENTS, lambda batch, _: all_of_them.append(batch.worker_id))

    for worker_id in ("w1", "w2", "w1"):
        await sender.publish(KV_EVENTS, kv_batch(1, worker_id=worker_id))

    await until(lambda: len(all_of_them) == 3)
    await until(lambda: len(one) == 2)
    assert one == ["w1", "w1"]


@pytest.mark.parametrize("megabytes", [1, 20])
async def test_a_prompt_beyond_the_servers_limit_arrives_whole(world, megabytes):
    router, worker = await world.bus(), await world.bus()
    got: asyncio.Future = asyncio.get_running_loop().create_future()
    await worker.subscribe(START_LEG, lambda leg, _: got.set_result(leg), worker_id="w1")
    body = bytes(range(256)) * (megabytes * 4096)

    await router.publish(START_LEG, start_leg(body=body), headers={"traceparent": "00-1"}, key="leg-1")

    assert (await soon(got)).body == body


async def test_large_messages_of_several_senders_do_not_mix(world):
    routers = [await world.bus() for _ in range(3)]
    worker = await world.bus()
    got = {}
    await worker.subscribe(START_LEG, lambda leg, _: got.update({leg.leg_id: leg.body}))
    bodies = {f"leg-{i}": bytes([i]) * (3_000_000 + i) for i in range(3)}

    async with asyncio.TaskGroup() as tasks:
        for router, (leg_id, body) in zip(routers, bodies.items(), strict=True):
            tasks.create_task(router.publish(START_LEG, start_leg(leg_id, body=body)))

    await until(lambda: len(got) == 3)
    assert got == bodies


async def test_messages_of_one_channel_keep_their_order_whatever_their_size(world):
    router, worker = await world.bus(), await world.bus()
    got = []
    await worker.subscribe(START_LEG, lambda leg, _: got.append(leg.leg_id))

    large = asyncio.ensure_future(router.publish(START_LEG, start_leg("large", body=b"x" * 20_000_000)))
    await asyncio.sleep(0)
    await router.publish(START_LEG, start_leg("small"))
    await large

    await until(lambda: len(got) == 2)
    assert got == ["large", "small"]


async def test_a_message_beyond_the_budget_is_refused_before_anything_is_sent(world):
    router, worker = await world.bus(), await world.bus()
    got = []
    await worker.subscribe(START_LEG, lambda leg, _: got.append(leg.leg_id))

    with pytest.raises(MessageTooLarge):
        await router.publish(START_LEG, start_leg("huge", body=b"x" * FRAME_BUDGET_BYTES))
    await router.publish(START_LEG, start_leg("next"))

    await until(lambda: got)
    assert got == ["next"]


@pytest.mark.parametrize("size", [10, 3_000_000])
async def test_a_command_without_a_subscriber_fails_at_once(world, size):
    router, worker = await world.bus(), await world.bus()
    unreachable = []
    router.on_unreachable(unreachable.append)
    await worker.subscribe(START_LEG, lambda _leg, _: None, worker_id="w1")

    await router.publish(START_LEG, start_leg("heard", worker_id="w1", body=b"x" * size), key="heard")
    await router.publish(START_LEG, start_leg("lost", worker_id="w2", body=b"x" * size), key="lost")

    await until(lambda: unreachable)
    assert unreachable == ["lost"]


@pytest.mark.parametrize("name", ["a b", "a\r\nPUB kv.w1.events 0", "a\tb", "a\nb"])
async def test_an_id_that_cannot_be_in_a_subject_is_unreachable(world, name):
    router, worker = await world.bus(), await world.bus()
    unreachable, heard = [], []
    router.on_unreachable(unreachable.append)
    await worker.subscribe(START_LEG, lambda leg, _: heard.append(leg.leg_id))

    await router.publish(START_LEG, start_leg("lost", worker_id=name), key="lost")
    with pytest.raises(NoResponders):
        await soon(router.ask(KV_SNAPSHOT, AskKvSnapshot(worker_id=name, epoch=1), timeout_s=60.0))
    await router.publish(START_LEG, start_leg("heard", worker_id="w1"))

    await until(lambda: heard and unreachable)
    assert (heard, unreachable) == (["heard"], ["lost"])
    assert router.counts.reconnects == 0


async def test_invalid_bytes_are_counted_and_the_next_message_is_handled(world):
    sender, receiver = await world.bus(), await world.bus()
    got = []
    await receiver.subscribe(KV_EVENTS, lambda batch, _: got.append(batch.seq))

    await world.raw("kv.w1.events", b"\xc1 not msgpack")
    await until(lambda: receiver.counts.bad_messages == 1)
    await sender.publish(KV_EVENTS, kv_batch(1))

    await until(lambda: got == [1])
    assert not receiver.failed.done()


async def test_a_handler_that_raises_ends_the_bus(world):
    sender, receiver = await world.bus(), await world.bus()

    def broken(_batch, _envelope):
        raise ZeroDivisionError("a bug")

    await receiver.subscribe(KV_EVENTS, broken)
    await sender.publish(KV_EVENTS, kv_batch(1))

    with pytest.raises(ZeroDivisionError):
        await soon(asyncio.shield(receiver.failed))


async def test_a_subscriber_that_is_too_slow_loses_messages_and_knows_it(world):
    sender, receiver = await world.bus(), await world.bus()
    go_on = asyncio.Event()
    told = []

    async def slow(_batch, _envelope):
        await go_on.wait()

    subscription = await receiver.subscribe(KV_EVENTS, slow, queue_max=4, on_dropped=lambda: told.append(1))
    for seq in range(20):
        await sender.publish(KV_EVENTS, kv_batch(seq))

    await until(lambda: subscription.dropped >= 15)
    assert len(told) == subscription.dropped == receiver.counts.dropped
    go_on.set()


async def test_a_closed_subscription_receives_nothing(world):
    sender, receiver = await world.bus(), await world.bus()
    closed, open_ = [], []
    subscription = await receiver.subscribe(KV_EVENTS, lambda batch, _: closed.append(batch.seq))
    await receiver.subscribe(KV_EVENTS, lambda batch, _: open_.append(batch.seq))

    await subscription.close()
    await sender.publish(KV_EVENTS, kv_batch(1))

    await until(lambda: open_)
    assert closed == []


async def test_a_closed_bus_refuses_and_may_be_closed_twice(world):
    bus = await world.bus()

    await bus.close()
    await bus.close()

    with pytest.raises(BusDown):
        await bus.publish(KV_EVENTS, kv_batch(1))
    assert not bus.failed.done()


async def test_a_plain_handler_that_returns_an_awaitable_fails_the_bus(world):
    sender, receiver = await world.bus(), await world.bus()
    never = asyncio.Event()

    await receiver.subscribe(KV_EVENTS, lambda _batch, _envelope: never)
    await sender.publish(KV_EVENTS, kv_batch(1))

    with pytest.raises(TypeError):
        await soon(asyncio.shield(receiver.failed))


async def test_a_coroutine_function_handles_one_message_at_a_time_in_order(world):
    sender, receiver = await world.bus(), await world.bus()
    log = []

    async def handle(batch, _envelope):
        log.append(("begin", batch.seq))
        await asyncio.sleep(0)
        log.append(("end", batch.seq))

    await receiver.subscribe(KV_EVENTS, handle)
    for seq in range(3):
        await sender.publish(KV_EVENTS, kv_batch(seq))

    await until(lambda: len(log) == 6)
    assert log == [(step, seq) for seq in range(3) for step in ("begin", "end")]


async def test_messages_read_in_batches_arrive_in_order(world):
    sender, receiver = await world.bus(), await world.bus()
    got, loads = [], []
    await receiver.subscribe(KV_EVENTS, lambda batch, _: got.append(batch.seq), in_batches=True)
    await receiver.subscribe(LOAD, lambda report, _: loads.append(report.worker_id), in_batches=True)

    for seq in range(500):
        await sender.publish(KV_EVENTS, kv_batch(seq))
        await sender.publish(LOAD, load("w1"))

    await until(lambda: len(got) == len(loads) == 500)
    assert got == list(range(500))


async def test_a_handler_of_batches_that_raises_ends_the_bus(world):
    sender, receiver = await world.bus(), await world.bus()

    def broken(_batch, _envelope):
        raise RuntimeError("a bug")

    await receiver.subscribe(KV_EVENTS, broken, in_batches=True)
    await sender.publish(KV_EVENTS, kv_batch(1))

    with pytest.raises(RuntimeError, match="a bug"):
        await soon(receiver.failed)


async def test_bad_messages_read_in_batches_are_counted(world):
    receiver, got = await world.bus(), []
    await receiver.subscribe(KV_EVENTS, lambda batch, _: got.append(batch.seq), in_batches=True)

    await world.raw("kv.w1.events", b"no message")

    await until(lambda: receiver.counts.bad_messages == 1)
    assert not got
