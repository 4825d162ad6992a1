"""Legs that one side knows of and the other does not: found by the worker's in-flight list, and closed."""

from __future__ import annotations

from shared.bus.leg_inbox import LISTS_MISSED_MAX
from shared.contracts.channels import FRAMES
from shared.contracts.failures import Reason
from shared.contracts.inference import LegReport
from tests.integration.bus.test_legs import fails, open_inbox, open_worker, read_all
from tests.integration.bus.worlds import soon, until
from tests.support.builders import start_leg
from tests.support.pulled_legs import PulledLeg


async def world_with_a_leg(world):
    _, inbox = await open_inbox(world)
    worker = await open_worker(world)
    leg = await PulledLeg.start(inbox, start_leg())
    return inbox, worker, leg, await worker.next_leg()


async def test_a_leg_whose_cancel_was_lost_is_cancelled_again(world):
    inbox, worker, leg, _answer = await world_with_a_leg(world)
    leg.cancel()
    await until(lambda: worker.cancelled)
    worker.cancelled.clear()  # It was lost.

    await worker.sender.send_in_flight_lists()  # The cancel might have been under way.
    await worker.sender.send_in_flight_lists()

    await until(lambda: worker.cancelled)
    assert worker.cancelled == [leg.leg_id]
    assert inbox.orphans.served == 1


async def test_a_leg_of_which_its_router_knows_nothing_is_cancelled(world):
    inbox, worker, _leg, _answer = await world_with_a_leg(world)
    worker.sender.leg(start_leg("leg-unknown"))

    await worker.sender.send_in_flight_lists()

    await until(lambda: worker.cancelled)
    assert worker.cancelled == ["leg-unknown"]
    assert inbox.orphans.served == 1


async def test_a_stream_that_its_worker_has_lost_fails_at_the_next_in_flight_list(world):
    inbox, worker, leg, answer = await world_with_a_leg(world)
    answer.head(200, "text/event-stream")
    await soon(leg.frames())
    answer.abandon()

    await worker.sender.send_in_flight_lists()

    await fails(leg, Reason.FRAMES_LOST)
    assert inbox.orphans.awaited == 1


async def test_a_leg_that_never_arrived_fails_after_some_in_flight_lists_and_not_before(world):
    inbox, worker, leg, answer = await world_with_a_leg(world)
    answer.abandon()

    for _ in range(LISTS_MISSED_MAX - 1):
        await worker.sender.send_in_flight_lists()
    await until(lambda: leg.leg.lists_missed == LISTS_MISSED_MAX - 1)
    assert not leg.ended
    await worker.sender.send_in_flight_lists()

    await fails(leg, Reason.FRAMES_LOST)
    assert inbox.orphans.awaited == 1


async def test_a_leg_that_ends_during_the_in_flight_list_ends_normally(world):
    inbox, worker, leg, answer = await world_with_a_leg(world)
    answer.head(200, "text/plain")
    await soon(leg.frames())

    answer.data(b"all of it")
    answer.end(LegReport())
    await worker.sender.send_in_flight_lists()

    assert (await read_all(leg))[0].data == b"all of it"
    assert inbox.orphans.awaited == 0


async def test_a_leg_that_is_served_stays(world):
    inbox, worker, leg, answer = await world_with_a_leg(world)
    answer.head(200, "text/plain")
    await soon(leg.frames())

    for _ in range(LISTS_MISSED_MAX + 1):
        await worker.sender.send_in_flight_lists()
    answer.end(LegReport())

    await read_all(leg)
    assert (inbox.orphans.served, inbox.orphans.awaited) == (0, 0)


async def test_a_router_without_legs_gets_empty_lists_for_a_while(world):
    bus, inbox = await open_inbox(world)
    worker = await open_worker(world)
    lists = []
    await bus.subscribe(FRAMES, lambda batch, _: lists.append(batch.in_flight), router_id="r1")
    leg = await PulledLeg.start(inbox, start_leg())
    (await worker.next_leg()).end(LegReport())
    await read_all(leg)

    for _ in range(100):
        await worker.sender.send_in_flight_lists()
    await PulledLeg.start(inbox, start_leg("another"))
    (await worker.next_leg()).head(200, "text/plain")
    await worker.sender.send_in_flight_lists()

    await until(lambda: ["another"] in lists)
    assert 1 < lists.count([]) < 100
