"""Requests for a model that sleeps: they wait within their bounds, or get a reason and a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from services.router.admission.waker import WAITING_MAX, Waker
from services.router.placement.fleet import Fleet
from services.router.placement.placement import PlacementPolicy, Rejection
from services.router.request.context import RequestContext
from services.router.request.head import Head
from services.router.request.http_request import HttpRequest, NoConnection, Upload, UploadTotals
from shared.bus.leg_inbox import LegInbox
from shared.bus.port import Envelope
from shared.contracts.channels import WAKE_MODEL
from shared.contracts.failures import Reason
from shared.contracts.fleet_orders import ModelWaking, WakeModel
from shared.contracts.ids import Epoch, RouterId
from shared.contracts.workers import LoraAdapter, WorkerPhase
from tests.support.fleet_builders import load, record
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.virtual_time import in_virtual_time

ASLEEP = record("w1", WorkerPhase.ASLEEP)


class World:
    def __init__(self, answer: Callable[[], ModelWaking] | None, *, wake_s_max: float = 20.0) -> None:
        self.hub = MemoryHub()
        self.fleet = Fleet(PlacementPolicy())
        self.fleet.cluster.record(ASLEEP, self.now())
        self.waker = Waker(MemoryBus(self.hub), self.fleet, self.now, wake_s_max=wake_s_max)
        self.answer = answer
        self.asked: list[str] = []

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    async def open(self) -> World:
        if self.answer is not None:
            await MemoryBus(self.hub).answer(WAKE_MODEL, self._on_ask)
        return self

    async def _on_ask(self, ask: WakeModel, _envelope: Envelope) -> ModelWaking:
        assert self.answer is not None
        self.asked.append(ask.model)
        return self.answer()

    def be_ready(self) -> None:
        self.fleet.cluster.record(msgspec.structs.replace(ASLEEP, phase=WorkerPhase.READY), self.now())
        self.fleet.cluster.report(load("w1"), self.now())

    def request(self, ends_in_s: float = 1000.0) -> RequestContext:
        now = self.now()
        head, upload = Head("/v1/completions", [], lambda: "r1"), Upload(now, UploadTotals())
        return RequestContext(
            http_request=HttpRequest(NoConnection(), head, upload, http11=True, keep_alive=True),
            inbox=LegInbox(MemoryBus(self.hub), RouterId("r1"), leg_buffer_bytes_max=1 << 20),
            started_at=now,
            ends_at=now + ends_in_s,
            on_end=lambda: None,
        )


def waking(expected_s: float = 5.0) -> Callable[[], ModelWaking]:
    return lambda: ModelWaking(asleep=True, expected_s=expected_s)


@in_virtual_time
async def test_a_request_waits_until_its_model_is_awake():
    world = await World(waking()).open()
    woken = asyncio.create_task(world.waker.wake(world.request(), "m"))
    await asyncio.sleep(4.0)
    assert not woken.done()

    world.be_ready()

    assert await woken is True
    assert set(world.asked) == {"m"}


@in_virtual_time
async def test_many_requests_for_a_model_ask_as_rarely_as_one():
    world = await World(waking()).open()
    waits = [asyncio.create_task(world.waker.wake(world.request(), "m")) for _ in range(50)]
    await asyncio.sleep(5.0)
    world.be_ready()

    assert await asyncio.gather(*waits) == [True] * 50
    assert len(world.asked) <= 4


@pytest.mark.parametrize(("wake_s_max", "expected_s", "retry_after_s"), [(20.0, 45.0, 45.0), (0.0, 5.0, 5.0)])
@in_virtual_time
async def test_a_request_that_cannot_wait_so_long_is_told_when_to_come_again(wake_s_max, expected_s, retry_after_s):
    world = await World(waking(expected_s), wake_s_max=wake_s_max).open()

    rejection = await world.waker.wake(world.request(), "m")

    assert isinstance(rejection, Rejection)
    assert (rejection.reason, rejection.retry_after_s) == (Reason.MODEL_ASLEEP, retry_after_s)
    assert "asleep" in rejection.message


@in_virtual_time
async def test_a_waking_that_takes_too_long_ends_the_wait_at_its_bound():
    world = await World(waking(5.0), wake_s_max=20.0).open()
    began = world.now()

    rejection = await world.waker.wake(world.request(), "m")

    assert isinstance(rejection, Rejection)
    assert 14.0 <= world.now() - began <= 20.5


@in_virtual_time
async def test_the_orchestrators_refusal_and_time_reach_the_client():
    refusing = ModelWaking(asleep=True, refusal="2 other models are awake and in use", retry_after_s=17.2)
    world = await World(lambda: refusing).open()

    rejection = await world.waker.wake(world.request(), "m")

    assert isinstance(rejection, Rejection)
    assert "2 other models are awake" in rejection.message
    assert rejection.retry_after_s == 18.0


@in_virtual_time
async def test_without_an_orchestrator_nothing_wakes():
    world = await World(None).open()

    rejection = await world.waker.wake(world.request(), "m")

    assert isinstance(rejection, Rejection)
    assert rejection.reason is Reason.MODEL_ASLEEP
    assert "no orchestrator" in rejection.message


@in_virtual_time
async def test_without_an_orchestrator_a_model_whose_workers_left_is_not_called_asleep():
    world = await World(None).open()
    world.fleet.cluster.record(msgspec.structs.replace(ASLEEP, phase=WorkerPhase.DRAINING), world.now())

    assert await world.waker.wake(world.request(), "m") is False


@in_virtual_time
async def test_a_model_whose_workers_are_between_two_processes_is_asked_for():
    world = await World(waking()).open()
    world.fleet.cluster.unregister(ASLEEP.worker_id)
    await asyncio.sleep(10.0)
    world.fleet.cluster.sweep(world.now(), 3.0)
    assert world.fleet.cluster.workers == {}
    woken = asyncio.create_task(world.waker.wake(world.request(), "m"))
    await asyncio.sleep(1.0)

    world.be_ready()

    assert await woken is True


@in_virtual_time
async def test_a_request_for_an_adapter_wakes_its_model_and_waits_for_the_adapter():
    world = await World(waking()).open()
    adapter = LoraAdapter(name="poet", digest="d", hashed_as="h")
    loaded = msgspec.structs.replace(ASLEEP, phase=WorkerPhase.READY, adapters=[adapter])
    world.fleet.cluster.record(loaded, world.now())
    world.fleet.cluster.record(msgspec.structs.replace(ASLEEP, epoch=Epoch(2)), world.now())
    woken = asyncio.create_task(world.waker.wake(world.request(), "poet"))
    await asyncio.sleep(1.0)
    world.fleet.cluster.record(msgspec.structs.replace(ASLEEP, epoch=Epoch(2), phase=WorkerPhase.READY), world.now())
    world.answer = ModelWaking  # It is awake; the adapter is still to be loaded.
    await asyncio.sleep(2.0)
    assert not woken.done()

    world.fleet.cluster.record(msgspec.structs.replace(loaded, epoch=Epoch(2)), world.now())

    assert await woken is True
    assert set(world.asked) == {"m"}


@in_virtual_time
async def test_models_that_do_not_sleep_are_left_to_placement():
    world = await World(ModelWaking).open()

    assert await world.waker.wake(world.request(), "unknown") is False
    assert world.asked == []
    assert await world.waker.wake(world.request(), "m") is False  # The orchestrator says that it only starts.
    world.be_ready()
    assert await world.waker.wake(world.request(), "m") is False


@in_virtual_time
async def test_a_client_that_leaves_ends_the_wait():
    world = await World(waking()).open()
    context = world.request()
    woken = asyncio.create_task(world.waker.wake(context, "m"))
    await asyncio.sleep(1.0)

    context.http_request.left = True

    assert await woken is False


@in_virtual_time
async def test_the_number_of_waiting_requests_is_bounded():
    world = await World(waking()).open()
    waits = [asyncio.create_task(world.waker.wake(world.request(), "m")) for _ in range(WAITING_MAX)]
    await asyncio.sleep(1.0)

    rejection = await world.waker.wake(world.request(), "m")

    assert isinstance(rejection, Rejection)
    assert "too many requests wait" in rejection.message
    world.be_ready()
    await asyncio.gather(*waits)
