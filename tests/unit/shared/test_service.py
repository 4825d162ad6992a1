"""The life of a process, on the memory bus."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest
from opentelemetry.trace import NoOpTracer

from shared.bus.port import BusRefused
from shared.contracts.channels import SERVICE_STATUS
from shared.contracts.control import RouterHealth, ServicePhase
from shared.runtime.service import (
    EXIT_CONFIGURATION,
    EXIT_FAILED,
    Service,
    ServiceFacts,
    WrongConfiguration,
    baton_version,
    live,
)
from tests.support.fake_clock import FakeClock
from tests.support.memory_bus import MemoryBus, MemoryHub

SOON_S = 5.0
ENDED_S_MAX = 30.0


class Stage:
    """A service on a hub, and somebody who listens to what it says about itself."""

    def __init__(self) -> None:
        self.hub = MemoryHub()
        self.bus = MemoryBus(self.hub)
        self.heard: list[tuple[ServicePhase, str]] = []
        self.service = Service(ServiceFacts(name="router", instance="r1"), self.bus, FakeClock(), NoOpTracer())

    async def run(self, main, drain_s_max: float = SOON_S) -> int:
        listener = MemoryBus(self.hub)
        await listener.subscribe(SERVICE_STATUS, self._hear)
        try:
            async with asyncio.timeout(ENDED_S_MAX):
                code = await live(self.service, main, drain_s_max=drain_s_max)
            await asyncio.sleep(0)
            return code
        finally:
            await listener.close()

    def _hear(self, status, _envelope) -> None:
        if (status.phase, status.detail) not in self.heard:
            self.heard.append((status.phase, status.detail))


async def test_a_service_that_stops_cleanly_publishes_each_phase_and_exits_0():
    stage = Stage()

    async def main(service):
        service.set_phase(ServicePhase.READY)
        await asyncio.sleep(0)
        service.stopping.set()
        await service.stopping.wait()

    assert await stage.run(main) == 0
    assert [phase for phase, _ in stage.heard] == [ServicePhase.READY, ServicePhase.STOPPED]
    assert not stage.bus.connected


async def test_a_status_has_version_host_time_and_the_services_fields():
    stage, told = Stage(), []
    await MemoryBus(stage.hub).subscribe(SERVICE_STATUS, lambda status, _envelope: told.append(status))
    health = RouterHealth(not_exact={"w1": "degraded"})

    async def main(service):
        service.extend_status(lambda status: msgspec.structs.replace(status, router=health))
        service.set_phase(ServicePhase.READY)
        await asyncio.sleep(0)

    await stage.run(main)
    last = told[-1]
    assert (last.version, last.host) == (baton_version(), socket.gethostname())
    assert last.at_ms == stage.service.clock.wall_ms()
    assert last.router == health


async def test_background_tasks_end_when_main_returns():
    stage = Stage()
    ended = []

    async def forever():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def main(service):
        service.tasks.create_task(forever())
        await asyncio.sleep(0)

    assert await stage.run(main) == 0
    assert ended == [True]


@pytest.mark.parametrize(
    ("message", "detail"),
    [
        ("a bug", "a bug"),
        ("a bug\nmore", "a bug"),
        ("one of these: \n(1) a bug\n(2) luck", "one of these: (1) a bug (2) luck"),
    ],
)
async def test_an_unexpected_exception_is_logged_and_exits_1(message: str, detail: str):
    stage = Stage()

    async def main(_service):
        raise ZeroDivisionError(message)

    assert await stage.run(main) == 1
    assert stage.heard[-1] == (ServicePhase.FAILED, detail)


async def test_a_wrong_setting_found_late_exits_with_78_and_the_whole_message():
    stage = Stage()
    message = "the engine cannot serve: " + "because " * 40

    async def main(_service):
        raise WrongConfiguration(message)

    assert await stage.run(main) == EXIT_CONFIGURATION
    assert stage.heard[-1] == (ServicePhase.FAILED, message)


async def test_a_background_task_that_raises_ends_the_process():
    stage = Stage()

    async def broken():
        raise ZeroDivisionError("a bug behind")

    async def main(service):
        service.tasks.create_task(broken())
        await service.stopping.wait()

    assert await stage.run(main) == 1
    assert stage.heard[-1] == (ServicePhase.FAILED, "a bug behind")


async def test_a_bus_that_fails_ends_the_process():
    stage = Stage()

    async def main(service):
        stage.bus.failed.set_exception(RuntimeError("closed for good"))
        await service.stopping.wait()

    assert await stage.run(main) == 1


async def test_a_drain_beyond_its_deadline_exits_1():
    stage = Stage()

    async def main(service):
        service.stopping.set()
        await asyncio.Event().wait()

    assert await stage.run(main, drain_s_max=0.05) == 1
    assert "not drained" in stage.heard[-1][1]


async def test_a_service_lives_through_an_outage_of_the_bus():
    stage = Stage()

    async def main(service):
        stage.bus.lose()
        service.set_phase(ServicePhase.READY)
        await asyncio.sleep(0)
        stage.bus.restore()

    assert await stage.run(main) == 0


async def test_a_process_whose_key_nats_no_longer_knows_ends_to_be_started_with_the_present_one(caplog):
    stage = Stage()

    async def main(service):
        service.bus.fail(BusRefused("NATS does not know the key"))
        await asyncio.Event().wait()

    assert await stage.run(main) == EXIT_FAILED
    assert stage.heard[-1] == (ServicePhase.FAILED, "NATS does not know the key")
    assert [
        line.exc_info for line in caplog.records if line.message == "the process ends: NATS does not know the key"
    ] == [None]
