"""Transcripts of what orchestrators say when workers, orchestrators and NATS come and go.

A transcript is blocks of ``orders``, ``----``, ``what was heard``. The real orchestrators run on a memory bus in virtual
time. REWRITE=1 writes what was heard into the files: commit the difference only if you understand it.

Orders: ``o1 starts|stops|dies|is cut off|is reached``; ``w1 starts [as prefill]``, ``w1 is ready|draining``,
``w1 leaves|hangs|wakes|dies``; ``nats stops|returns|loses everything``; ``wait SECONDS``.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from services.orchestrator.service import Orchestrator
from services.orchestrator.settings import Settings
from shared.bus.port import BusDown
from shared.contracts.channels import FLEET_STATE, LOAD, WORKER_LOST, WORKER_RECORDS
from shared.contracts.workers import FleetState, Role, WorkerLost, WorkerPhase
from tests.support.fleet_builders import load, record
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.virtual_time import LoopClock, run_in_virtual_time

HERE = Path(__file__).parent
RENEW_S = 3
MOMENT_S = 0.001
"""After each order, so that what it started has begun."""


class PlayedWorker:
    """A worker's voice: a load report each second, its record every three."""

    def __init__(self, world: World, name: str, role: Role, epoch: int) -> None:
        self.name, self.role, self.epoch = name, role, epoch
        self.phase = WorkerPhase.STARTING
        self.bus = MemoryBus(world.hub)
        self.voice: asyncio.Task[None] | None = None

    async def speak(self) -> None:
        self.records = await self.bus.key_value_store(WORKER_RECORDS)
        second = 0
        while True:
            try:
                if second % RENEW_S == 0:
                    await self.register()
                if self.phase is not WorkerPhase.STARTING:
                    await self.bus.publish(LOAD, load(self.name, self.epoch, self.phase, self.role))
            except BusDown:
                second = -1  # register first thing when the bus is back
            second += 1
            await asyncio.sleep(1.0)

    async def register(self) -> None:
        await self.records.put(record(self.name, self.phase, self.epoch, self.role))

    def hush(self) -> None:
        if self.voice:
            self.voice.cancel()


class PlayedOrchestrator:
    def __init__(self, world: World, name: str) -> None:
        self.bus = MemoryBus(world.hub)
        self.stopping = asyncio.Event()
        one = Orchestrator(self.bus, LoopClock(), name, Settings())
        self.life = asyncio.get_running_loop().create_task(one.run(self.stopping, lambda: None))


class World:
    """The fleet that a transcript plays with, and an ear on the bus."""

    def __init__(self) -> None:
        self.hub = MemoryHub()
        self.ear = MemoryBus(self.hub)
        self.workers: dict[str, PlayedWorker] = {}
        self.orchestrators: dict[str, PlayedOrchestrator] = {}
        self.heard: list[str] = []
        self.last_leader = ""
        self.last_fleet = ""

    async def listen(self) -> None:
        await self.ear.subscribe(WORKER_LOST, self._hear_lost)
        await self.ear.subscribe(FLEET_STATE, self._hear_state)

    def note(self, what: str) -> None:
        self.heard.append(f"{asyncio.get_running_loop().time():5.1f}s  {what}")

    def _hear_lost(self, lost: WorkerLost, _envelope) -> None:
        self.note(f"{lost.worker_id} lost (epoch {lost.epoch}, silent {lost.silent_s:.1f} s)")

    def _hear_state(self, state: FleetState, _envelope) -> None:
        if (leader := f"{state.leader} leads in term {state.term}") != self.last_leader:
            self.last_leader = leader
            self.note(leader)
        told = ", ".join(f"{each.record.worker_id} {each.phase}" for each in state.workers) or "nobody"
        if told != self.last_fleet:
            self.last_fleet = told
            self.note(f"fleet: {told}")

    async def obey(self, order: str) -> None:
        who, *what = order.split()
        if who == "wait":
            await asyncio.sleep(float(what[0]))
        elif who == "nats":
            self._obey_nats(" ".join(what))
        elif who.startswith("o"):
            await self._obey_orchestrator(who, " ".join(what))
        else:
            await self._obey_worker(who, what)

    def _buses(self) -> list[MemoryBus]:
        return [self.ear, *(each.bus for each in [*self.workers.values(), *self.orchestrators.values()])]

    def _obey_nats(self, what: str) -> None:
        match what:
            case "stops":
                for bus in self._buses():
                    bus.lose()
            case "loses everything":
                for bucket in self.hub.buckets.values():
                    for key in list(bucket.values):
                        bucket.remove(key)
            case "returns":
                for bus in self._buses():
                    bus.restore()
            case _:
                raise ValueError(what)

    async def _obey_orchestrator(self, name: str, what: str) -> None:
        match what:
            case "starts":
                self.orchestrators[name] = PlayedOrchestrator(self, name)
            case "stops":
                one = self.orchestrators.pop(name)
                one.stopping.set()
                await one.life
            case "dies":
                one = self.orchestrators.pop(name)
                one.bus.lose()
                one.life.cancel()
            case "is cut off":
                self.orchestrators[name].bus.lose()
            case "is reached":
                self.orchestrators[name].bus.restore()
            case _:
                raise ValueError(what)

    async def _obey_worker(self, name: str, what: list[str]) -> None:
        match what:
            case ["starts", *as_role]:
                if name in self.workers:
                    self.workers[name].hush()
                epoch = self.workers[name].epoch + 1 if name in self.workers else 1
                worker = self.workers[name] = PlayedWorker(
                    self, name, Role(as_role[-1] if as_role else Role.BOTH), epoch
                )
                worker.voice = asyncio.get_running_loop().create_task(worker.speak())
            case ["is", phase]:
                self.workers[name].phase = WorkerPhase(phase)
                await self.workers[name].register()
            case ["leaves"]:
                self.workers[name].hush()
                await self.workers[name].records.delete(name)
            case ["hangs"] | ["dies"]:
                self.workers[name].hush()
            case ["wakes"]:
                self.workers[name].voice = asyncio.get_running_loop().create_task(self.workers[name].speak())
            case _:
                raise ValueError(what)

    async def end(self) -> None:
        for worker in self.workers.values():
            worker.hush()
        for one in self.orchestrators.values():
            one.stopping.set()
            one.life.cancel()
        for bus in self._buses():
            await bus.close()


async def play(script: str) -> str:
    world, blocks = World(), []
    await world.listen()
    for block in script.strip().split("\n\n"):
        orders = [line for line in block.split("\n----")[0].splitlines() if line.strip()]
        for order in orders:
            if not order.startswith("#"):
                await world.obey(order)
                await asyncio.sleep(MOMENT_S)
        blocks.append("\n".join([*orders, "----", *world.heard]))
        world.heard.clear()
    await world.end()
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize("path", sorted(HERE.glob("orchestrator_*.txt")), ids=lambda path: path.stem)
def test_a_transcript_is_what_happens(path):
    played = run_in_virtual_time(play(path.read_text()))
    if os.environ.get("REWRITE"):
        path.write_text(played)

    assert path.read_text() == played, "if this is right, REWRITE=1 pytest tests/scenarios"
