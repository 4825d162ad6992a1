"""Orchestrators as processes on a real NATS server: killed leaders, silent workers, a server that lost its data."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from shared.bus.nats_bus import connect_nats
from shared.bus.port import Bus, BusError, Envelope
from shared.contracts.channels import DESCRIBE_FLEET, FLEET_STATE, LOAD, SERVICE_STATUS, WORKER_LOST, WORKER_RECORDS
from shared.contracts.control import ServicePhase, ServiceStatus
from shared.contracts.workers import DescribeFleet, FleetState, WorkerLost, WorkerPhase
from tests.support.fleet_builders import load, record
from tests.support.processes import service_process

pytestmark = pytest.mark.nats

LEASE_S = 3.0
WAIT_S_MAX = 60.0
AWAY_S = 4.0
"""Longer than a worker may be silent."""
SEVERAL_STATES = 5
"""Fleet states are told once a second: after so many, what would have gone wrong has gone wrong."""


class Ear:
    """Hears what orchestrators say."""

    def __init__(self) -> None:
        self.states: list[FleetState] = []
        self.losses: list[WorkerLost] = []
        self.ready: set[str] = set()
        self._heard = asyncio.Event()

    async def listen(self, bus: Bus) -> None:
        await bus.subscribe(FLEET_STATE, lambda state, _envelope: self._hear(self.states, state))
        await bus.subscribe(WORKER_LOST, lambda lost, _envelope: self._hear(self.losses, lost))
        await bus.subscribe(SERVICE_STATUS, self._hear_status)

    def _hear(self, into: list, what: FleetState | WorkerLost) -> None:
        into.append(what)
        self._heard.set()

    def _hear_status(self, status: ServiceStatus, _envelope: Envelope) -> None:
        if status.phase is ServicePhase.READY:
            self.ready.add(status.instance)
        self._heard.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S_MAX):
            while not holds():
                self._heard.clear()
                await self._heard.wait()

    def phases(self) -> dict[str, WorkerPhase]:
        return {each.record.worker_id: each.phase for each in self.states[-1].workers} if self.states else {}


@asynccontextmanager
async def talking_worker(url: str, worker_id: str) -> AsyncIterator[asyncio.Task[None]]:
    """Registers and reports its load until its task is cancelled, whatever happens to the server."""
    bus = await connect_nats(url, name=worker_id)

    async def talk() -> None:
        while True:
            try:
                async with asyncio.timeout(2.0):
                    records = await bus.key_value_store(WORKER_RECORDS)
                    await records.put(record(worker_id))
                    await bus.publish(LOAD, load(worker_id))
            except (BusError, TimeoutError):
                pass
            await asyncio.sleep(0.5)

    task = asyncio.create_task(talk())
    try:
        yield task
    finally:
        task.cancel()
        await bus.close()


def orchestrator(nats_server, directory, name):
    return service_process(
        "orchestrator",
        directory,
        BATON_NATS_URL=nats_server.url,
        ORCHESTRATOR_INSTANCE=name,
        ORCHESTRATOR_LEASE_S=str(LEASE_S),
    )


@pytest.fixture
async def ear(nats_server):
    bus = await connect_nats(nats_server.url, name="ear")
    one = Ear()
    await one.listen(bus)
    one.bus = bus
    yield one
    await bus.close()


async def test_a_killed_leader_is_followed_by_the_one_that_stood_by(nats_server, tmp_path, ear):
    with orchestrator(nats_server, tmp_path, "o1") as first:
        await ear.until(lambda: bool(ear.states))
        with orchestrator(nats_server, tmp_path, "o2"):
            async with talking_worker(nats_server.url, "w1"):
                await ear.until(lambda: ear.phases() == {"w1": WorkerPhase.READY})
                await ear.until(lambda: "o2" in ear.ready)
                first.kill()
                await ear.until(lambda: ear.states[-1].leader == "o2")

                assert ear.states[-1].term == 2
                assert ear.phases() == {"w1": WorkerPhase.READY}
                assert ear.losses == []


async def test_a_silent_worker_is_lost_and_a_stopped_leader_leaves_cleanly(nats_server, tmp_path, ear):
    with orchestrator(nats_server, tmp_path, "o1") as one:
        async with talking_worker(nats_server.url, "w1") as talking:
            await ear.until(lambda: ear.phases() == {"w1": WorkerPhase.READY})
            talking.cancel()
            await ear.until(lambda: bool(ear.losses))

            assert ear.losses[0].worker_id == "w1"
            answer = await ear.bus.ask(DESCRIBE_FLEET, DescribeFleet(), timeout_s=WAIT_S_MAX)
            assert [each.phase for each in answer.workers] == [WorkerPhase.LOST]
        assert one.stop() == 0


async def test_the_fleet_recovers_without_losses_from_an_empty_nats(nats_server, tmp_path, ear):
    with orchestrator(nats_server, tmp_path, "o1"), orchestrator(nats_server, tmp_path, "o2"):
        async with talking_worker(nats_server.url, "w1"), talking_worker(nats_server.url, "w2"):
            both = {"w1": WorkerPhase.READY, "w2": WorkerPhase.READY}
            await ear.until(lambda: ear.phases() == both)
            nats_server.kill()
            nats_server.lose_storage()
            await asyncio.sleep(AWAY_S)
            ear.states.clear()
            nats_server.start()
            await ear.until(lambda: ear.phases() == both)
            ear.states.clear()
            await ear.until(lambda: len(ear.states) >= SEVERAL_STATES)

            assert ear.phases() == both
            assert ear.losses == []


async def test_a_suspended_leader_steps_down_and_declares_no_worker_lost(nats_server, tmp_path, ear):
    with orchestrator(nats_server, tmp_path, "o1") as first:
        await ear.until(lambda: bool(ear.states))
        with orchestrator(nats_server, tmp_path, "o2"):
            async with talking_worker(nats_server.url, "w1"):
                await ear.until(lambda: ear.phases() == {"w1": WorkerPhase.READY} and "o2" in ear.ready)
                first.process.send_signal(signal.SIGSTOP)
                await ear.until(lambda: ear.states[-1].leader == "o2")
                ear.states.clear()
                first.process.send_signal(signal.SIGCONT)
                await ear.until(lambda: len(ear.states) >= SEVERAL_STATES)

                assert {state.leader for state in ear.states} == {"o2"}
                assert ear.losses == []


async def test_a_stuck_nats_makes_no_worker_lost(nats_server, tmp_path, ear):
    with orchestrator(nats_server, tmp_path, "o1"):
        async with talking_worker(nats_server.url, "w1"):
            await ear.until(lambda: ear.phases() == {"w1": WorkerPhase.READY})
            nats_server.pause()
            await asyncio.sleep(AWAY_S)
            ear.states.clear()
            nats_server.resume()
            await ear.until(lambda: len(ear.states) >= SEVERAL_STATES)

            assert ear.phases() == {"w1": WorkerPhase.READY}
            assert ear.losses == []
