"""An engine that cannot serve ends its worker with a reason, which stays until a start succeeds."""

from __future__ import annotations

import asyncio

from services.worker.engines.port import EngineRefused
from shared.contracts.channels import SERVICE_STATUS
from shared.contracts.control import ServicePhase
from shared.runtime.service import EXIT_CONFIGURATION, live
from shared.runtime.settings import CommonSettings
from shared.runtime.state_folder import refusals
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.unit.worker.fakes import WAIT_S_MAX, WORKER, FakeEngine, RunningWorker, running_worker

REASON = "The Baton connector cannot exchange this engine's KV: every layer attends to 64 tokens only."


class RefusedWorker(RunningWorker):
    """Its engine cannot serve."""

    async def start_engine(self, _settings, _common, say, *, identity) -> FakeEngine:
        raise EngineRefused(REASON)


async def test_a_refused_engine_is_reported_and_remembered(tmp_path):
    common = CommonSettings(state_dir=str(tmp_path))
    hub, heard = MemoryHub(), []
    listener = MemoryBus(hub)
    await listener.subscribe(SERVICE_STATUS, lambda status, _envelope: heard.append((status.phase, status.detail)))
    worker = RefusedWorker(hub, FakeEngine(), common)

    async with asyncio.timeout(WAIT_S_MAX):
        assert await live(worker.service, worker.main, drain_s_max=WAIT_S_MAX) == EXIT_CONFIGURATION
    await asyncio.sleep(0)

    assert heard[-1] == (ServicePhase.FAILED, REASON)
    ((reason, _at_s),) = refusals(common.state_dir).values()
    assert reason == REASON
    await listener.close()

    async with running_worker(common=common):
        assert WORKER not in refusals(common.state_dir)
