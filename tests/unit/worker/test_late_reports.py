"""Which report is repeated when, and by a thread that the worker's event loop does not hold."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future

import pytest

from services.worker.late_reports import HELD_S_MAX, LATE_S_MIN, LateReports
from shared.bus.port import BusDown
from shared.contracts.channels import LOAD
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import KvDigest
from shared.contracts.load import LoadReport
from shared.contracts.workers import Role, WorkerPhase
from tests.support.memory_bus import MemoryBus, MemoryHub

REPORT = LoadReport(
    worker_id=WorkerId("w1"),
    epoch=Epoch(1),
    role=Role.BOTH,
    phase=WorkerPhase.READY,
    legs=3,
    digest=KvDigest(seq=4, count=2, xor=7),
)
WAIT_S_MAX = 30.0


async def never() -> MemoryBus:
    raise BusDown("no server")


@pytest.mark.parametrize(
    ("age_s", "is_due"), [(0.0, False), (1.4, False), (1.6, True), (HELD_S_MAX - 1, True), (HELD_S_MAX + 1, False)]
)
def test_a_report_is_repeated_from_when_the_next_is_late_until_the_loop_may_never_come_back(age_s, is_due):
    late = LateReports(never)
    assert late.due(time.monotonic()) is None
    late.sent(REPORT)

    report = late.due(time.monotonic() + age_s)

    assert (report is not None) is is_due
    if report is not None:
        assert report.loop_late_s == pytest.approx(age_s, abs=0.1)
        assert (report.legs, report.phase, report.digest) == (3, WorkerPhase.READY, None)


async def test_a_held_loop_is_reported_by_the_thread_and_a_free_one_is_not():
    """The connection is the thread's own: it is opened and used while this test's loop is held."""
    heard: Future[LoadReport] = Future()

    async def connect() -> MemoryBus:
        bus = MemoryBus(MemoryHub())
        await bus.subscribe(LOAD, lambda report, _envelope: heard.done() or heard.set_result(report))
        return bus

    with LateReports(connect) as late:
        late.sent(REPORT)
        report = heard.result(WAIT_S_MAX)  # Holds the loop.

    assert report.loop_late_s >= LATE_S_MIN


async def test_without_nats_the_thread_tries_again_and_ends_with_the_worker():
    tried = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def connect() -> MemoryBus:
        loop.call_soon_threadsafe(tried.set)
        raise BusDown("no server")

    with LateReports(connect) as late:
        await asyncio.wait_for(tried.wait(), WAIT_S_MAX)
        tried.clear()
        await asyncio.wait_for(tried.wait(), WAIT_S_MAX)

    await asyncio.to_thread(late._thread.join, WAIT_S_MAX)
    assert not late._thread.is_alive()
