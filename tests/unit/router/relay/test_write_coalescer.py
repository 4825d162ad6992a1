"""Streams write at once while the router is idle, and together while it is busy."""

from __future__ import annotations

import asyncio

import pytest

from services.router.relay.write_coalescer import (
    BUSY_EVENTS_PER_S,
    RESUMED_AT_ONCE,
    WINDOW_S,
    WRITES_PER_S,
    WriteCoalescer,
)
from services.router.settings import Settings
from shared.bus.frame_sender import LegFrames
from shared.contracts.inference import LegReport, StartLeg
from tests.support.virtual_time import in_virtual_time
from tests.unit.router.fake_worker import DONE, EVENTS, SSE, FakeWorker
from tests.unit.router.world import World, in_world, parse

WAIT_S_MAX = Settings().write_wait_s_max


def busy(streams: int, events_per_s: float = 1.1 * BUSY_EVENTS_PER_S, wait_s_max: float = WAIT_S_MAX) -> WriteCoalescer:
    """After one window of so many events."""
    coalescer = WriteCoalescer(wait_s_max)
    for _ in range(streams):
        coalescer.enter()
    now = asyncio.get_running_loop().time()
    coalescer.must_wait(now, now, 0)
    coalescer.must_wait(now, now + WINDOW_S, int(events_per_s * WINDOW_S))
    return coalescer


@in_virtual_time
async def test_streams_write_at_once_while_few_events_come():
    assert busy(1000, 0.9 * BUSY_EVENTS_PER_S).period_s == 0.0


@in_virtual_time
async def test_busy_streams_write_as_often_together_however_many_they_are():
    assert [busy(streams).period_s * WRITES_PER_S for streams in (1, 16, 256)] == pytest.approx([1, 16, 256])


@in_virtual_time
async def test_a_token_waits_a_tenth_of_a_second_at_most_or_as_the_settings_say():
    assert [busy(100_000, wait_s_max=most).period_s for most in (WAIT_S_MAX, 0.2, 0.0)] == [0.1, 0.2, 0.0]


@in_virtual_time
async def test_a_stream_waits_if_it_has_written_at_the_last_common_moment():
    coalescer = busy(100)
    now = asyncio.get_running_loop().time() + WINDOW_S

    assert [coalescer.must_wait(now - periods * coalescer.period_s, now, 0) for periods in (0.0, 1.0, 1.1, 2.0)] == [
        True,
        True,
        True,
        False,
    ]


@in_virtual_time
async def test_after_a_pause_streams_write_at_once_again():
    coalescer = busy(100)
    now = asyncio.get_running_loop().time() + 1.0

    assert coalescer.period_s > 0
    assert not coalescer.must_wait(now, now, BUSY_EVENTS_PER_S // 2)
    assert coalescer.period_s == 0.0


@in_virtual_time
async def test_streams_that_ended_do_not_make_others_wait_longer():
    coalescer = busy(100)
    for _ in range(50):
        coalescer.leave()

    later = asyncio.get_running_loop().time() + 2 * WINDOW_S
    coalescer.must_wait(later, later, BUSY_EVENTS_PER_S)
    assert coalescer.period_s == pytest.approx(50 / WRITES_PER_S)


@in_virtual_time
async def test_all_waiting_streams_resume_at_one_moment_and_others_get_their_turn_between_them():
    loop = asyncio.get_running_loop()
    coalescer = busy(500)
    begun_at, resumed = loop.time(), [0.0] * 500
    before_others: list[int] = []

    def resume(number: int) -> None:
        resumed[number] = loop.time() - begun_at
        if number == 0:
            loop.call_soon(lambda: before_others.append(sum(at > 0 for at in resumed)))

    for number in range(500):
        coalescer.add(lambda number=number: resume(number))
    await asyncio.sleep(2 * coalescer.period_s)

    assert resumed == pytest.approx([coalescer.period_s] * 500)
    assert before_others == [RESUMED_AT_ONCE]


async def stream_slowly(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
    """Three events in 3 ms, and a second later another, 1 ms before the end."""
    frames.head(200, SSE)
    for data in [EVENTS[0]] * 3:
        frames.data(data)
        await asyncio.sleep(0.001)
    await asyncio.sleep(1.0)
    frames.data(EVENTS[0])
    await asyncio.sleep(0.001)
    frames.data(DONE)
    frames.end(LegReport(prompt_tokens=9, completion_tokens=4))


@in_world()
async def test_a_held_token_is_written_at_the_common_moment_and_the_end_of_a_stream_at_once(world: World):
    loop = asyncio.get_running_loop()
    coalescer = world.router.relay._legs.coalescer
    coalescer.period_s, coalescer._counted_at = 0.1, loop.time() + 60.0
    await world.worker("w1", script=stream_slowly)
    await asyncio.sleep(1.0)
    begun_at = loop.time()

    connection, answering = world.begin(b'{"model":"m","prompt":"x","stream":true}')
    seen = []
    for at in (0.05, 0.15):
        await asyncio.sleep(begun_at + at - loop.time())
        seen.append(connection.written.count(EVENTS[0]))
    await answering

    assert seen == [1, 3]
    assert loop.time() - begun_at < 1.05
    assert parse(connection.written).body == EVENTS[0] * 4 + DONE


WORKERS = 20
STREAMS = 300
STREAMED = 50
EVERY_S = 0.02
"""15,000 events a second."""


async def stream_steadily(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
    frames.head(200, SSE)
    for _ in range(STREAMED):
        frames.data(EVENTS[0])
        await asyncio.sleep(EVERY_S)
    frames.data(DONE)
    frames.end(LegReport(prompt_tokens=9, completion_tokens=STREAMED))


@in_world()
async def test_many_busy_streams_write_once_in_each_period_from_their_beginning_to_their_end(world: World):
    for number in range(WORKERS):
        await world.worker(f"w{number}", script=stream_steadily)
    await asyncio.sleep(1.0)

    begun = [world.begin(b'{"model":"m","prompt":"x","stream":true}') for _ in range(STREAMS)]
    await asyncio.gather(*[answering for _, answering in begun])

    assert [parse(connection.written).body for connection, _ in begun] == [EVENTS[0] * STREAMED + DONE] * STREAMS
    at_once = 2 * WINDOW_S / EVERY_S + 2
    periods = STREAMED * EVERY_S / (STREAMS / WRITES_PER_S)
    assert max(connection.writes for connection, _ in begun) <= at_once + periods
