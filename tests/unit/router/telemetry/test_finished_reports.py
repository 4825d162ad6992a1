"""Finished requests reach the collector in batches; those that do not are counted."""

from __future__ import annotations

import asyncio

from services.router.telemetry.request_log import REPORT_S, REPORTED_AT_ONCE_MAX, UNREPORTED_MAX, FinishedReports
from shared.contracts.channels import REQUESTS_FINISHED
from shared.contracts.ids import RequestId, RouterId
from shared.contracts.inference import RequestFinished, RequestsFinished
from shared.telemetry.prometheus import Count
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.virtual_time import in_virtual_time, run_in_virtual_time


class Collector:
    """What a collector has heard, and the reports of one router on a bus that can be lost."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.heard: list[str] = []
        self.unreported = Count()
        hub = MemoryHub()
        self.bus, self._own = MemoryBus(hub), MemoryBus(hub)
        self.reports = FinishedReports(RouterId("r1"), self.unreported)

    async def listen(self) -> None:
        await self._own.subscribe(REQUESTS_FINISHED, self._note)

    def _note(self, message: RequestsFinished, _envelope: object) -> None:
        self.batches.append(len(message.requests))
        self.heard += [request.request_id for request in message.requests]

    def finish(self, first: int, count: int) -> None:
        for number in range(first, first + count):
            one = RequestFinished(request_id=RequestId(f"{number}"), model="m", path="/", mode="aggregated", status=200)
            self.reports.add(one)


def numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]


@in_virtual_time
async def test_requests_of_an_interval_travel_in_one_message():
    world = Collector()
    await world.listen()
    following = asyncio.create_task(world.reports.follow(world.bus, lambda: None))
    for interval in range(3):
        world.finish(7 * interval, 7)
        await asyncio.sleep(REPORT_S * 1.01)
    following.cancel()
    assert (world.batches, world.heard) == ([7, 7, 7], numbers(21))


@in_virtual_time
async def test_an_outage_loses_no_request_up_to_the_bound_and_counts_those_beyond():
    world = Collector()
    await world.listen()
    following = asyncio.create_task(world.reports.follow(world.bus, lambda: None))
    world.bus.lose()
    world.finish(0, UNREPORTED_MAX // 2)
    await asyncio.sleep(5 * REPORT_S)
    world.finish(UNREPORTED_MAX // 2, UNREPORTED_MAX // 2 + 3)
    await asyncio.sleep(5 * REPORT_S)
    world.bus.restore()
    await asyncio.sleep(2 * REPORT_S * UNREPORTED_MAX / REPORTED_AT_ONCE_MAX)
    following.cancel()
    assert world.heard == numbers(UNREPORTED_MAX)
    assert max(world.batches) == REPORTED_AT_ONCE_MAX
    assert world.unreported.value == 3


def test_a_router_that_stops_reports_its_last_requests_or_says_how_many_it_could_not(caplog):
    async def scenario() -> None:
        world = Collector()
        await world.listen()
        world.finish(0, 2 * REPORTED_AT_ONCE_MAX + 5)
        await world.reports.close(world.bus)
        await asyncio.sleep(0)
        assert world.heard == numbers(2 * REPORTED_AT_ONCE_MAX + 5)
        assert not caplog.records
        world.finish(0, 4)
        world.bus.lose()
        await world.reports.close(world.bus)

    run_in_virtual_time(scenario())
    (line,) = caplog.records
    assert line.getMessage() == "the last 4 finished requests were not reported: NATS is down"
