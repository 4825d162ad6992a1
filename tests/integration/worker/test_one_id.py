"""Two simulated workers with one id on a real nats-server: the later one serves, the earlier one stops and says why."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from shared.bus.nats_bus import connect_nats
from shared.contracts.inference import LegKind
from shared.runtime.service import EXIT_CONFIGURATION
from tests.support.nats_server import NatsServer
from tests.support.worker_processes import Router, WorkerProcess, start_worker, wait_ready

pytestmark = pytest.mark.nats

STOPPED_S_MAX = 60.0


def worker(nats: NatsServer, folder: Path) -> WorkerProcess:
    folder.mkdir()
    return start_worker(nats.url, "w1", folder, environ={"BATON_STATE_DIR": str(folder)}, engine="simulated")


async def test_the_worker_that_began_earlier_stops_and_the_later_one_serves(nats_server, tmp_path):
    first = worker(nats_server, tmp_path / "first")
    bus = await connect_nats(nats_server.url, name="test")
    second = None
    try:
        await wait_ready(nats_server.url, [first])
        second = worker(nats_server, tmp_path / "second")
        code = await asyncio.to_thread(first.process.wait, STOPPED_S_MAX)
        await wait_ready(nats_server.url, [second])
        router = Router(bus)
        await router.open()
        answer = await router.leg(
            second, LegKind.AGGREGATED, {"model": second.record.models[0], "prompt": "one", "max_tokens": 4}
        )
        await router.inbox.close()

        said = first.log.read_text()
        assert code == EXIT_CONFIGURATION, said
        assert f"another process is worker w1 now: it began later, on {second.record.host}" in said
        assert f"(pid {second.process.pid})" in said
        assert "WORKER_WORKER_ID" in said
        assert (second.record.pid, answer.status) == (second.process.pid, 200)
        assert psutil.pid_exists(second.process.pid)
    finally:
        await bus.close()
        for one in (first, second):
            if one is not None:
                one.kill()
