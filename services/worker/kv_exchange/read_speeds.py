"""How fast this worker reads its partners' KV: measured after each passed KV self-test, published in its record."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable

import msgspec

from connector.messages import EngineCall, MeasureRead, ReadMeasured
from services.worker.kv_exchange.engine_calls import EngineCalls
from services.worker.lifecycle.registration import Registration
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.workers import KV_SPEED_MAX, KV_SPEEDS_MAX, KvReadSpeed
from shared.text.quantities import bytes_per_second

log = logging.getLogger("baton.worker")

MEASURE_S_MAX = 5.0
"""For a measurement and those before it. The engine needs less, unless it is in a long step."""
WAITING_MAX = 4
"""Measurements that may wait for the one under way; further ones are left out."""

Measure = Callable[[WorkerId, Epoch], Awaitable[ReadMeasured]]


class ReadSpeeds:
    """One measurement runs at a time, because two at a time would slow each other."""

    def __init__(self, measure: Measure, registration: Registration) -> None:
        self._measure = measure
        self._registration = registration
        self._one_at_a_time = asyncio.Lock()
        self._waiting = 0

    async def measure(self, source: WorkerId, epoch: Epoch) -> None:
        """Measure, log and publish within MEASURE_S_MAX. Never raises; a speed that cannot be measured is logged."""
        if self._waiting > WAITING_MAX:
            return
        self._waiting += 1
        try:
            async with asyncio.timeout(MEASURE_S_MAX), self._one_at_a_time:
                measured = await self._measure(source, epoch)
        except TimeoutError:
            measured = ReadMeasured(measure_id="", failure=f"it was not measured within {MEASURE_S_MAX:g} s")
        finally:
            self._waiting -= 1
        if measured.failure:
            log.info("the speed of reads from %s is not known: %s", source, measured.failure)
            return
        log.info("reads KV from %s at %s", source, bytes_per_second(measured.bytes_per_s))
        record = self._registration.record
        listed = updated(record.kv_reads, source, measured)
        await self._registration.update(msgspec.structs.replace(record, kv_reads=listed))


def updated(listed: list[KvReadSpeed], source: WorkerId, measured: ReadMeasured) -> list[KvReadSpeed]:
    """With the new speed, oldest first; at most KV_SPEEDS_MAX."""
    new = KvReadSpeed(
        source_id=source, bytes_per_s=min(KV_SPEED_MAX, int(measured.bytes_per_s)), memory=measured.memory
    )
    return [*(one for one in listed if one.source_id != source), new][-KV_SPEEDS_MAX:]


class SpeedMeasurer:
    """Matches results with calls."""

    def __init__(self, calls: EngineCalls) -> None:
        self._calls = calls
        self._under_way: dict[str, asyncio.Future[ReadMeasured]] = {}

    async def measure(self, worker_id: WorkerId, epoch: Epoch) -> ReadMeasured:
        """A result with ``failure`` if nothing could be measured. The caller bounds the wait."""
        measure_id = uuid.uuid4().hex
        done: asyncio.Future[ReadMeasured] = asyncio.get_running_loop().create_future()
        self._under_way[measure_id] = done
        order = MeasureRead(measure_id=measure_id, worker_id=worker_id, epoch=epoch)
        self._calls.add(EngineCall(measures=[order]))
        try:
            return await done
        finally:
            del self._under_way[measure_id]

    def ended(self, ends: list[ReadMeasured]) -> None:
        """The engine has ended these measurements."""
        for end in ends:
            done = self._under_way.get(end.measure_id)
            if done is not None and not done.done():
                done.set_result(end)
