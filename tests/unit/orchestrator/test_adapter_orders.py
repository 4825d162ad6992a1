"""Orders about adapters in virtual time: which workers get them, what is logged, and what a new worker gets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from services.orchestrator.orders import TRIES_MAX
from services.orchestrator.service import Orchestrator
from services.orchestrator.settings import Settings
from shared.bus.port import BusError
from shared.contracts.channels import (
    ADAPTER_ORDERED,
    CHANGE_ADAPTER,
    DESCRIBE_ADAPTERS,
    LOAD,
    ORDER_ADAPTER,
    WORKER_RECORDS,
)
from shared.contracts.fleet_orders import (
    AdapterAction,
    AdapterChanged,
    AdapterOrdered,
    Adapters,
    AskAdapters,
    ChangeAdapter,
    OrderAdapter,
)
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.workers import LoraAdapter
from tests.support.fleet_builders import adapter, load, record
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.virtual_time import LoopClock, in_virtual_time, run_in_virtual_time

PERIOD_S = 0.5


class LoraWorker:
    """Obeys CHANGE_ADAPTER and says so in its record. ``fails``: why it does not."""

    def __init__(self, hub: MemoryHub, name: str, epoch: int = 1, fails: str = "") -> None:
        self.name, self.epoch, self.fails = name, epoch, fails
        self.orders: list[ChangeAdapter] = []
        self.hangs = False
        self.loaded: dict[str, LoraAdapter] = {}
        self._bus = MemoryBus(hub)

    async def live(self) -> None:
        await self._bus.answer(CHANGE_ADAPTER, self._change, worker_id=self.name)
        while True:
            with contextlib.suppress(BusError):
                await self._register()
                await self._bus.publish(LOAD, load(self.name, self.epoch))
            await asyncio.sleep(PERIOD_S)

    async def _register(self) -> None:
        records = await self._bus.key_value_store(WORKER_RECORDS)
        await records.put(record(self.name, epoch=self.epoch, adapters=tuple(self.loaded.values())))

    async def _change(self, order: ChangeAdapter, _envelope) -> AdapterChanged:
        self.orders.append(order)
        if self.hangs:
            await asyncio.Future()
        if not self.fails and order.action is AdapterAction.LOAD:
            self.loaded[order.name] = adapter(order.name, order.path)
        elif not self.fails:
            del self.loaded[order.name]
        await self._register()
        told = {"failure": self.fails, "digest": "" if self.fails else order.path}
        return AdapterChanged(worker_id=WorkerId(self.name), epoch=Epoch(self.epoch), **told)


@dataclass
class Loras:
    hub: MemoryHub
    tasks: asyncio.TaskGroup
    workers: dict[str, LoraWorker] = field(default_factory=dict)
    told: list[AdapterOrdered] = field(default_factory=list)
    lives: dict[str, asyncio.Task] = field(default_factory=dict)

    def start(self, name: str, **facts) -> LoraWorker:
        if name in self.lives:
            self.lives[name].cancel()
        worker = self.workers[name] = LoraWorker(self.hub, name, **facts)
        self.lives[name] = self.tasks.create_task(worker.live())
        return worker

    async def order(self, action: str, *workers: str, path: str = "sql-v1", by: str = "ada@host") -> AdapterOrdered:
        named = OrderAdapter(
            action=AdapterAction(action), name="sql", path=path, workers=[WorkerId(one) for one in workers], by=by
        )
        return await MemoryBus(self.hub).ask(ORDER_ADAPTER, named, timeout_s=200.0)

    async def described(self) -> Adapters:
        return await MemoryBus(self.hub).ask(DESCRIBE_ADAPTERS, AskAdapters(), timeout_s=1.0)


@asynccontextmanager
async def fleet(*names: str) -> AsyncIterator[Loras]:
    hub = MemoryHub()
    async with asyncio.TaskGroup() as tasks:
        world, end = Loras(hub, tasks), asyncio.Event()
        await MemoryBus(hub).subscribe(ADAPTER_ORDERED, lambda done, _envelope: world.told.append(done))
        for name in names:
            world.start(name)
        one = Orchestrator(MemoryBus(hub), LoopClock(), "o1", Settings(planner="off"))
        tasks.create_task(one.run(end, lambda: None))
        await asyncio.sleep(5)
        yield world
        end.set()
        for life in world.lives.values():
            life.cancel()


def test_an_order_reaches_all_workers_and_is_told_and_logged(caplog):
    async def scenario() -> None:
        async with fleet("w1", "w2") as world:
            done = await world.order("load")

            assert {change.worker_id: change.digest for change in done.changes} == {"w1": "sql-v1", "w2": "sql-v1"}
            assert [one.name for worker in world.workers.values() for one in worker.loaded.values()] == ["sql", "sql"]
            assert world.told == [done]
            found = await world.described()
            assert [(one.name, one.model, one.path, one.workers) for one in found.wanted] == [
                ("sql", "m", "sql-v1", [])
            ]
            assert found.orders == [done]

    with caplog.at_level(logging.INFO, "services.orchestrator.adapter_orders"):
        run_in_virtual_time(scenario())
    (line,) = [one.getMessage() for one in caplog.records if "adapter order" in one.getMessage()]
    assert "'ada@host'" in line
    assert "load 'sql' from 'sql-v1': w1: sql-v1, w2: sql-v1" in line


@in_virtual_time
async def test_a_worker_that_ends_before_its_reply_holds_no_order_up():
    async with fleet("w1", "w2") as world:
        world.workers["w2"].hangs = True
        ordering = asyncio.create_task(world.order("load"))
        await asyncio.sleep(5)
        assert not ordering.done(), "it may still be loading"
        world.start("w2", epoch=2)
        async with asyncio.timeout(10):
            done = await ordering

        assert {one.worker_id: one.failure for one in done.changes} == {"w1": "", "w2": "it ended meanwhile"}


@in_virtual_time
async def test_a_worker_that_starts_later_gets_the_adapter():
    async with fleet("w1") as world:
        await world.order("load")
        late = world.start("w2")
        await asyncio.sleep(10)
        assert late.loaded.keys() == {"sql"}
        assert [(done.automatic, done.order.by, done.order.workers) for done in world.told[1:]] == [
            (True, "ada@host", ["w2"])
        ]

        again = world.start("w1", epoch=2)
        await asyncio.sleep(10)
        assert again.loaded.keys() == {"sql"}

        await world.order("unload")
        assert not late.loaded
        world.start("w1", epoch=3)
        await asyncio.sleep(10)
        assert not world.workers["w1"].orders


@in_virtual_time
async def test_a_worker_that_cannot_load_it_is_not_asked_for_ever():
    async with fleet("w1") as world:
        bad = world.start("w2", fails="its rank is too large")
        await asyncio.sleep(2)
        done = await world.order("load")
        assert [bool(change.failure) for change in done.changes] == [False, True]

        await asyncio.sleep(120)
        assert len(bad.orders) == 1 + TRIES_MAX


@in_virtual_time
async def test_an_order_that_fails_everywhere_is_not_wanted():
    async with fleet() as world:
        world.start("w1", fails="no such folder")
        await asyncio.sleep(2)
        assert (await world.order("load")).changes[0].failure == "no such folder"
        assert (await world.described()).wanted == []


@pytest.mark.parametrize(("action", "workers"), [("unload", ()), ("load", ("w9",)), ("load", ("w.*",))])
@in_virtual_time
async def test_an_order_that_makes_no_sense_changes_nothing(action, workers):
    async with fleet("w1") as world:
        done = await world.order(action, *workers)
        assert done.refusal
        assert not world.workers["w1"].orders
        assert world.told == [done]


@in_virtual_time
async def test_the_next_leader_knows_what_is_wanted():
    hub = MemoryHub()
    async with asyncio.TaskGroup() as tasks:
        world = Loras(hub, tasks)
        world.start("w1")
        for name in ("o1", "o2"):
            end = asyncio.Event()
            one = Orchestrator(MemoryBus(hub), LoopClock(), name, Settings(planner="off"))
            running = tasks.create_task(one.run(end, lambda: None))
            await asyncio.sleep(15)
            if name == "o1":
                await world.order("load")
            else:
                world.start("w2")
                await asyncio.sleep(15)
                assert world.workers["w2"].loaded.keys() == {"sql"}
            end.set()
            await running
        for life in world.lives.values():
            life.cancel()
