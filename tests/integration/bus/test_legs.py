"""Legs over the bus: a router's inbox and a worker's sender."""

from __future__ import annotations

import asyncio

import pytest

from shared.bus.frame_sender import FrameSender, LegGone
from shared.bus.leg_inbox import Leg, LegFailed, LegInbox
from shared.bus.port import BusDown, MessageTooLarge
from shared.contracts.channels import CANCEL_LEG, FRAMES, START_LEG
from shared.contracts.failures import Failure, Reason
from shared.contracts.inference import Frame, FrameBatch, FrameKind, LegReport
from tests.integration.bus.worlds import FRAME_BUDGET_BYTES, SOON_S, soon, until
from tests.support.builders import start_leg
from tests.support.pulled_legs import PulledLeg

LEG_BUFFER_BYTES_MAX = 1024 * 1024


async def open_inbox(world, router_id: str = "r1"):
    bus = await world.bus()
    inbox = LegInbox(bus, router_id, leg_buffer_bytes_max=LEG_BUFFER_BYTES_MAX)
    await inbox.open()
    return bus, inbox


class Worker:
    """A worker that hands the legs it gets to the test."""

    def __init__(self, bus, worker_id: str = "w1") -> None:
        self.bus = bus
        self.worker_id = worker_id
        self.sender = FrameSender(bus, worker_id, 1)
        self.legs: asyncio.Queue = asyncio.Queue()
        self.cancelled: list[str] = []
        self.gone: list[Reason] = []

    async def open(self) -> Worker:
        await self.bus.subscribe(START_LEG, self._started, worker_id=self.worker_id)
        await self.bus.subscribe(
            CANCEL_LEG, lambda cancel, _: self.cancelled.append(cancel.leg_id), worker_id=self.worker_id
        )
        return self

    def _started(self, start, _envelope) -> None:
        self.legs.put_nowait(self.sender.leg(start, lambda failure: self.gone.append(failure.reason)))

    async def next_leg(self):
        return await soon(self.legs.get())


async def open_worker(world, worker_id: str = "w1") -> Worker:
    return await Worker(await world.bus(), worker_id).open()


async def started(world):
    """A leg: the router's end, its worker, the worker's end."""
    _, inbox = await open_inbox(world)
    worker = await open_worker(world)
    return await PulledLeg.start(inbox, start_leg()), worker, await worker.next_leg()


async def read_all(leg) -> list[Frame]:
    frames: list[Frame] = []
    while not frames or frames[-1].kind is not FrameKind.END:
        frames += await soon(leg.frames())
    return frames


async def fails(leg, reason: Reason) -> None:
    with pytest.raises(LegFailed) as failed:
        await soon(leg.frames())
    assert failed.value.failure.reason is reason


async def test_frames_arrive_in_order_from_head_to_end(world):
    leg, _worker, answer = await started(world)

    answer.head(200, "text/event-stream")
    for i in range(50):
        answer.data(b"token %d" % i, [i])
    answer.end(LegReport(completion_tokens=50))

    frames = await read_all(leg)
    assert [frame.seq for frame in frames] == list(range(51))
    assert (frames[0].status, frames[0].content_type) == (200, "text/event-stream")
    assert [frame.token_ids for frame in frames[1:]] == [[i] for i in range(50)]
    assert frames[-1].report == LegReport(completion_tokens=50)
    assert leg.ended


async def test_frames_of_one_loop_iteration_travel_in_one_message(world):
    bus, inbox = await open_inbox(world)
    worker = await open_worker(world)
    batches = []
    await bus.subscribe(FRAMES, lambda batch, _: batches.append(len(batch.frames)), router_id="r1")
    legs = [await PulledLeg.start(inbox, start_leg(f"leg-{i}")) for i in range(10)]
    answers = [await worker.next_leg() for _ in legs]

    for answer in answers:
        answer.head(200, "text/plain")

    await until(lambda: batches)
    assert batches == [10]
    await inbox.close()


class CountedLeg(PulledLeg):
    calls = 0

    def leg_changed(self, leg: Leg) -> None:
        self.calls += 1
        super().leg_changed(leg)


@pytest.mark.parametrize("fails", [False, True])
async def test_the_reader_of_a_held_leg_is_called_only_at_its_end(world, fails: bool):
    _, inbox = await open_inbox(world)
    worker = await open_worker(world)
    leg = await CountedLeg.start(inbox, start_leg())
    answer = await worker.next_leg()
    answer.head(200, "text/event-stream")
    await soon(leg.frames())

    leg.leg.held = True
    answer.data(b"one", [1])
    await until(lambda: leg.leg.unread)
    assert leg.calls == 1

    if fails:
        answer.fail(Failure(reason=Reason.INTERNAL, message="a test"))
    else:
        answer.end(LegReport(completion_tokens=1))
    await until(lambda: leg.calls > 1)
    assert leg.calls == 2
    assert leg.leg.has_failed is fails
    assert [frame.data for frame in await soon(leg.frames())] == [b"one"] + [b""] * (not fails)
    await inbox.close()


async def test_a_response_that_is_sent_whole_is_one_frame(world):
    leg, _worker, answer = await started(world)
    report = LegReport(completion_tokens=2)

    answer.head(200, "application/json")
    answer.data(b"{}", [5, 6], [1], 3)
    answer.end(report)

    assert await read_all(leg) == [
        Frame(
            leg_id="leg-1",
            seq=0,
            kind=FrameKind.END,
            data=b"{}",
            token_ids=[5, 6],
            status=200,
            content_type="application/json",
            report=report,
            joined=[1],
            cached_tokens=3,
        )
    ]


async def test_the_end_takes_the_place_of_frames_of_its_own_leg_that_have_not_left(world):
    _, inbox = await open_inbox(world)
    worker = await open_worker(world)
    one, other = [await PulledLeg.start(inbox, start_leg(leg_id)) for leg_id in ("one", "other")]
    answers = {answer.leg_id: answer for answer in [await worker.next_leg() for _ in "12"]}
    answers["one"].head(200, "text/plain")
    sent = await soon(one.frames())

    answers["one"].data(b"a")
    answers["other"].head(200, "text/plain")
    answers["one"].end(LegReport())
    answers["other"].data(b"b")
    answers["other"].data(b"c")
    answers["other"].end(LegReport())

    sent += await read_all(one)
    assert [(frame.seq, frame.kind, frame.data) for frame in sent] == [
        (0, FrameKind.HEAD, b""),
        (1, FrameKind.DATA, b"a"),
        (2, FrameKind.END, b""),
    ]
    assert [(frame.seq, frame.kind, frame.data, frame.status) for frame in await read_all(other)] == [
        (0, FrameKind.HEAD, b"", 200),
        (1, FrameKind.DATA, b"b", 0),
        (2, FrameKind.END, b"c", 0),
    ]


async def test_two_routers_get_their_own_frames(world):
    _, one = await open_inbox(world, "r1")
    _, two = await open_inbox(world, "r2")
    worker = await open_worker(world)
    legs = [
        await PulledLeg.start(one, start_leg("a", router_id="r1")),
        await PulledLeg.start(two, start_leg("b", router_id="r2")),
    ]
    for _ in legs:
        answer = await worker.next_leg()
        answer.data(answer.leg_id.encode())
        answer.end(LegReport())

    assert [(await read_all(leg))[0].data for leg in legs] == [b"a", b"b"]


async def test_a_failure_is_raised_after_the_frames_before_it(world):
    leg, _worker, answer = await started(world)
    failure = Failure(reason=Reason.ENGINE_DEAD, message="the engine died")

    answer.data(b"a")
    answer.fail(failure)

    assert [frame.data for frame in await soon(leg.frames())] == [b"a"]
    with pytest.raises(LegFailed) as failed:
        await soon(leg.frames())
    assert failed.value.failure == failure


async def test_a_leg_to_an_absent_worker_fails_at_once(world):
    _, inbox = await open_inbox(world)

    leg = await PulledLeg.start(inbox, start_leg(worker_id="nobody"))

    await fails(leg, Reason.WORKER_LOST)


async def test_a_missing_frame_fails_the_leg_and_stops_the_worker(world):
    _, inbox = await open_inbox(world)
    worker = await open_worker(world)
    leg = await PulledLeg.start(inbox, start_leg())
    frames = [Frame(leg_id="leg-1", seq=seq, kind=FrameKind.DATA, data=b"x") for seq in (0, 2)]

    await worker.bus.publish(FRAMES, FrameBatch(router_id="r1", worker_id="w1", epoch=1, frames=frames))

    assert len(await soon(leg.frames())) == 1
    await fails(leg, Reason.FRAMES_LOST)
    await until(lambda: worker.cancelled == ["leg-1"])


async def test_a_cancel_is_sent_once_and_wakes_the_reader(world):
    _, inbox = await open_inbox(world)
    worker = await open_worker(world)
    leg = await PulledLeg.start(inbox, start_leg())
    reading = asyncio.ensure_future(leg.frames())
    await worker.next_leg()

    leg.cancel()
    leg.cancel()

    with pytest.raises(LegFailed) as failed:
        await soon(reading)
    assert failed.value.failure.reason is Reason.CANCELLED
    await until(lambda: worker.cancelled == ["leg-1"])


async def test_a_cancelled_reader_loses_no_frames(world):
    leg, _worker, answer = await started(world)
    reading = asyncio.ensure_future(leg.frames())
    await asyncio.sleep(0)
    reading.cancel()

    answer.data(b"a")
    answer.end(LegReport())

    assert [frame.data for frame in await read_all(leg)] == [b"a"]


async def test_a_leg_whose_client_does_not_read_is_ended_at_its_bound(world):
    leg, worker, answer = await started(world)

    for _ in range(5):
        answer.data(b"x" * (LEG_BUFFER_BYTES_MAX // 4))

    await until(lambda: leg.ended)
    await until(lambda: worker.cancelled == ["leg-1"])
    await soon(leg.frames())
    await fails(leg, Reason.CLIENT_SLOW)


async def test_losing_a_worker_fails_its_legs_of_that_life_only(world):
    _, inbox = await open_inbox(world)
    await open_worker(world, "w1")
    await open_worker(world, "w2")
    old = await PulledLeg.start(inbox, start_leg("old", worker_id="w1", epoch=1))
    new = await PulledLeg.start(inbox, start_leg("new", worker_id="w1", epoch=2))
    other = await PulledLeg.start(inbox, start_leg("other", worker_id="w2", epoch=1))

    inbox.worker_lost("w1", 1)

    await fails(old, Reason.WORKER_LOST)
    assert (new.ended, other.ended) == (False, False)


async def test_an_answer_of_many_megabytes_arrives_whole(world):
    _, inbox = await open_inbox(world)
    inbox._leg_buffer_bytes_max = 64 * 1024 * 1024
    worker = await open_worker(world)
    leg = await PulledLeg.start(inbox, start_leg())
    answer = await worker.next_leg()
    pieces = [bytes([i]) * 500_000 for i in range(20)]

    for piece in pieces:
        answer.data(piece)
        await soon(answer.drain())
    answer.end(LegReport())

    frames = await read_all(leg)
    assert b"".join(frame.data for frame in frames) == b"".join(pieces)


async def test_a_frame_beyond_the_budget_fails_its_leg_with_the_reason(world):
    leg, worker, answer = await started(world)

    answer.head(200, "text/plain")
    answer.data(b"x" * FRAME_BUDGET_BYTES)

    assert (await soon(leg.frames()))[0].status == 200
    await fails(leg, Reason.TOO_LARGE)
    assert worker.gone == [Reason.TOO_LARGE]


async def test_a_body_beyond_the_budget_is_refused_before_anything_is_sent(world):
    _, inbox = await open_inbox(world)

    with pytest.raises(MessageTooLarge):
        await PulledLeg.start(inbox, start_leg(body=b"x" * FRAME_BUDGET_BYTES))


async def test_a_worker_learns_that_its_router_is_gone(world):
    router, inbox = await open_inbox(world)
    worker = await open_worker(world)
    await PulledLeg.start(inbox, start_leg())
    answer = await worker.next_leg()
    await router.close()

    def told_while_it_sends() -> bool:  # The server may need a moment to see that the router's connection is closed.
        answer.data(b"for nobody")
        return worker.gone == [Reason.CANCELLED]

    await until(told_while_it_sends)
    with pytest.raises(LegGone):
        await soon(answer.drain())
    answer.data(b"ignored")


async def test_a_worker_without_frames_can_check_whether_its_router_is_gone(world):
    router, inbox = await open_inbox(world)
    worker = await open_worker(world)
    leg = await PulledLeg.start(inbox, start_leg())
    await worker.next_leg()
    await worker.sender.send_in_flight_lists()
    assert worker.gone == []
    assert not leg.ended

    await router.close()

    async with asyncio.timeout(SOON_S):
        while not worker.gone:  # The server may need a moment to see that the router's connection is closed.
            await worker.sender.send_in_flight_lists()
            await asyncio.sleep(0)
    assert worker.gone == [Reason.CANCELLED]


async def test_an_outage_fails_legs_on_both_sides_at_once_and_new_legs_work_after_it(world):
    _, inbox = await open_inbox(world)
    worker = await open_worker(world)
    leg = await PulledLeg.start(inbox, start_leg())
    await worker.next_leg()

    async with world.outage():
        await fails(leg, Reason.BUS_DOWN)
        assert worker.gone == [Reason.BUS_DOWN]
        with pytest.raises(BusDown):
            await soon(PulledLeg.start(inbox, start_leg("during")))

    again = await PulledLeg.start(inbox, start_leg("after"))
    answer = await worker.next_leg()
    answer.end(LegReport())
    assert len(await read_all(again)) == 1


async def test_an_abandoned_leg_is_cancelled_once(world):
    router, inbox = await open_inbox(world)
    worker = await open_worker(world)
    forgotten = worker.sender.leg(start_leg("given-up-in-an-outage"))

    for _ in range(3):
        forgotten.data(b"x")
        await worker.bus.flush(5.0)
    forgotten.end(LegReport())

    await until(lambda: worker.cancelled)
    marker = await PulledLeg.start(inbox, start_leg("marker"))
    await worker.next_leg()
    marker.cancel()
    await until(lambda: "marker" in worker.cancelled)
    assert worker.cancelled == ["given-up-in-an-outage", "marker"]
    assert not router.failed.done()


async def test_a_frame_that_cannot_be_packed_fails_the_bus(world):
    worker = await open_worker(world)
    answer = worker.sender.leg(start_leg())

    answer.data(b"x", [object()])

    await until(worker.bus.failed.done)
    assert isinstance(worker.bus.failed.exception(), TypeError)
