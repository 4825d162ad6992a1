"""Orders about weights in virtual time: all workers of a model move together, also those that start later."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from services.orchestrator.orders import TRIES_MAX
from services.orchestrator.service import Orchestrator
from services.orchestrator.settings import Settings
from shared.bus.port import BusError
from shared.contracts.channels import (
    CHANGE_WEIGHTS,
    DESCRIBE_WEIGHTS,
    LOAD,
    ORDER_WEIGHTS,
    WANTED_WEIGHTS,
    WORKER_RECORDS,
)
from shared.contracts.fleet_orders import (
    NAME_CHARS_MAX,
    AskWeights,
    ChangeWeights,
    ModelWeights,
    OrderWeights,
    PauseMode,
    WantedWeights,
    WeightsAction,
    WeightsChanged,
    WeightsOrdered,
    weights_key,
)
from shared.contracts.ids import Epoch, WorkerId
from tests.support.fleet_builders import load, record
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.virtual_time import LoopClock, in_virtual_time, run_in_virtual_time

PERIOD_S = 0.5


class Trained:
    """Obeys CHANGE_WEIGHTS and says so in its record. ``fails``: why it does not. It has two ranks."""

    def __init__(self, hub: MemoryHub, name: str, epoch: int = 1, fails: str = "", model: str = "m") -> None:
        self.name, self.epoch, self.fails, self.model = name, epoch, fails, model
        self.orders: list[ChangeWeights] = []
        self.weights = ""
        self.dies_at: WeightsAction | None = None
        """It never replies to this order."""
        self._bus = MemoryBus(hub)

    async def live(self) -> None:
        await self._bus.answer(CHANGE_WEIGHTS, self._change, worker_id=self.name)
        while True:
            with contextlib.suppress(BusError):
                await self._register()
                await self._bus.publish(LOAD, load(self.name, self.epoch))
            await asyncio.sleep(PERIOD_S)

    async def _register(self) -> None:
        records = await self._bus.key_value_store(WORKER_RECORDS)
        plain = record(self.name, epoch=self.epoch, models=(self.model,))
        fingerprint = msgspec.structs.replace(plain.fingerprint, weights=self.weights)
        await records.put(msgspec.structs.replace(plain, fingerprint=fingerprint, ranks=2))

    async def _change(self, order: ChangeWeights, _envelope: object) -> WeightsChanged:
        self.orders.append(order)
        if order.action is self.dies_at:
            await asyncio.Future()
        if not self.fails and order.action in (WeightsAction.LOAD, WeightsAction.FINISH):
            self.weights = order.weights
        await self._register()
        return WeightsChanged(
            worker_id=WorkerId(self.name), epoch=Epoch(self.epoch), weights=self.weights, failure=self.fails
        )


@dataclass
class World:
    hub: MemoryHub
    tasks: asyncio.TaskGroup
    workers: dict[str, Trained] = field(default_factory=dict)
    lives: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def start(self, name: str, **facts: Any) -> Trained:
        if name in self.lives:
            self.lives[name].cancel()
        worker = self.workers[name] = Trained(self.hub, name, **facts)
        self.lives[name] = self.tasks.create_task(worker.live())
        return worker

    async def order(self, action: str, **fields: Any) -> WeightsOrdered:
        order = OrderWeights(action=WeightsAction(action), by="ada", **fields)
        return await MemoryBus(self.hub).ask(ORDER_WEIGHTS, order, timeout_s=200.0)

    async def wanted(self, model: str = "m") -> WantedWeights | None:
        store = await MemoryBus(self.hub).key_value_store(WANTED_WEIGHTS)
        found = await store.get(weights_key(model))
        return found.value if found is not None else None

    async def state(self) -> list[ModelWeights]:
        return (await MemoryBus(self.hub).ask(DESCRIBE_WEIGHTS, AskWeights(), timeout_s=1.0)).models


@asynccontextmanager
async def fleet(*names: str) -> AsyncIterator[World]:
    hub = MemoryHub()
    async with asyncio.TaskGroup() as tasks:
        world, end = World(hub, tasks), asyncio.Event()
        for name in names:
            world.start(name)
        one = Orchestrator(MemoryBus(hub), LoopClock(), "o1", Settings(planner="off"))
        tasks.create_task(one.run(end, lambda: None))
        await asyncio.sleep(5)
        yield world
        end.set()
        for life in world.lives.values():
            life.cancel()


def test_all_workers_get_the_weights_under_one_name_and_the_order_is_logged(caplog):
    async def scenario() -> None:
        async with fleet("w1", "w2") as world:
            first = await world.order("load", path="step-1", version="step-1")
            again = await world.order("load", path="step-1", version="step-1")

            names = {worker.weights for worker in world.workers.values()}
            assert names == {again.weights}
            assert again.weights.startswith("step-1#")
            assert first.weights != again.weights, "the folder may have other files now"
            assert (await world.wanted()).weights == again.weights

    with caplog.at_level(logging.INFO, "services.orchestrator.weights"):
        run_in_virtual_time(scenario())
    lines = [one.getMessage() for one in caplog.records if "weights order by 'ada'" in one.getMessage()]
    assert len(lines) == 2
    assert "load m 'step-1': w1: done, w2: done" in lines[0]


@in_virtual_time
async def test_a_worker_that_starts_later_loads_the_weights_a_few_times_at_most():
    async with fleet("w1") as world:
        done = await world.order("load", path="step-1", version="step-1")
        late = world.start("w2")
        failing = world.start("w3", fails="its disk is broken")
        await asyncio.sleep(20)

        assert [(one.action, one.path, one.weights) for one in late.orders] == [
            (WeightsAction.LOAD, "step-1", done.weights)
        ]
        assert late.weights == done.weights
        assert len(failing.orders) == TRIES_MAX
        assert len(world.workers["w1"].orders) == 1


@in_virtual_time
async def test_weights_of_a_trainer_cannot_be_given_to_a_worker_that_starts_later():
    async with fleet("w1") as world:
        await world.order("start")
        done = await world.order("finish", version="7")
        late = world.start("w2")
        await asyncio.sleep(20)

        assert (await world.wanted()).weights == done.weights
        assert late.orders == []
        assert late.weights == ""


@in_virtual_time
async def test_a_worker_that_fails_is_named_and_lacks_what_is_wanted():
    async with fleet("w1") as world:
        world.start("w2", fails="no memory")
        await asyncio.sleep(5)
        done = await world.order("load", path="step-1", version="step-1")

        assert {one.worker_id: one.failure for one in done.changes} == {"w1": "", "w2": "no memory"}
        wanted = await world.wanted()
        assert wanted.weights == world.workers["w1"].weights != world.workers["w2"].weights


@in_virtual_time
async def test_what_no_worker_has_loaded_is_not_wanted():
    async with fleet() as world:
        world.start("w1", fails="no such folder")
        await asyncio.sleep(5)
        done = await world.order("load", path="missing", version="x")

        assert (done.weights, done.changes[0].failure) == ("", "no such folder")
        assert await world.wanted() is None


@in_virtual_time
async def test_a_pause_is_kept_for_workers_that_start_later():
    async with fleet("w1", "w2") as world:
        await world.order("pause", mode=PauseMode.KEEP, clear_cache=False)
        assert [(one.mode, one.clear_cache) for one in world.workers["w2"].orders] == [(PauseMode.KEEP, False)]
        assert (await world.wanted()).paused
        (told,) = await world.state()
        assert (told.workers, told.ranks, told.wanted.paused) == (["w1", "w2"], 4, True)

        await world.order("resume")
        assert not (await world.wanted()).paused


@pytest.mark.parametrize("action", [WeightsAction.LOAD, WeightsAction.RESUME])
@in_virtual_time
async def test_a_worker_that_ends_before_its_reply_holds_no_order_up(action):
    async with fleet("w1", "w2") as world:
        await world.order("pause", mode=PauseMode.KEEP, clear_cache=False)
        world.workers["w2"].dies_at = action
        ordering = asyncio.create_task(world.order(action.value, path="step-1", version="step-1"))
        await asyncio.sleep(5)
        assert not ordering.done(), "it may still be at it"
        world.start("w2", epoch=2)
        async with asyncio.timeout(10):
            done = await ordering

        told = {one.worker_id: one.failure for one in done.changes}
        assert told == {"w1": ""} | ({} if action is WeightsAction.RESUME else {"w2": "it ended meanwhile"})
        assert (await world.wanted()).paused is (action is WeightsAction.LOAD)


@in_virtual_time
async def test_each_rank_of_all_workers_connects_to_the_trainer_under_its_own_number():
    async with fleet("w1", "w2") as world:
        await world.order("init", payload=json.dumps({"rank_offset": 1, "world_size": 5}).encode())

        told = [json.loads(worker.orders[0].payload) for worker in world.workers.values()]
        assert told == [{"rank_offset": 1, "world_size": 5}, {"rank_offset": 3, "world_size": 5}]


@in_virtual_time
async def test_orders_that_mean_no_model_or_several_are_refused():
    async with fleet("w1") as world:
        assert "no worker of other is ready" in (await world.order("resume", model="other")).refusal
        assert "a path is needed" in (await world.order("load")).refusal
        assert "printable" in (await world.order("finish", version="x" * (NAME_CHARS_MAX + 1))).refusal
        assert "cannot be read" in (await world.order("init", payload=b"[")).refusal
        world.start("w2", model="n")
        await asyncio.sleep(5)
        assert "several models (m, n)" in (await world.order("resume")).refusal
        assert (await world.order("resume", model="n")).changes[0].worker_id == "w2"
        assert world.workers["w1"].orders == []
