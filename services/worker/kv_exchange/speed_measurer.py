"""Has the engine measure how fast it reads another worker's blocks."""

from __future__ import annotations

import asyncio
import uuid

from connector.messages import EngineCall, MeasureRead, ReadMeasured
from services.worker.kv_exchange.engine_calls import EngineCalls
from shared.contracts.ids import Epoch, WorkerId


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
