"""A peer to which an engine was connecting when it died is not connected to by the next engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from connector.messages import PeerConnected
from services.worker.kv_exchange.peers import REFUSED_S
from services.worker.kv_exchange.suspects import Suspects
from shared.contracts.channels import WORKER_RECORDS
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.workers import WorkerPhase, WorkerRecord
from shared.runtime.service import live
from shared.runtime.settings import CommonSettings
from shared.runtime.state_folder import suspects_file
from tests.support.fake_clock import FakeClock
from tests.support.memory_bus import MemoryHub
from tests.unit.worker.fakes import WAIT_S_MAX, WORKER, FakeEngine, RunningWorker
from tests.unit.worker.kv_exchange.fakes import FakeExchange, OneWorker

EVIL = WorkerId("evil")


@pytest.fixture
def common(tmp_path) -> CommonSettings:
    return CommonSettings(state_dir=str(tmp_path))


@asynccontextmanager
async def registered(hub: MemoryHub, worker_id: str = "evil") -> AsyncIterator[None]:
    """A worker that answers handshakes and is no partner of self-tests."""
    worker = OneWorker(hub, worker_id)
    await worker.exchange.open()
    following = asyncio.create_task(worker.exchange.follow())
    await worker.say(WorkerPhase.PROBING)
    try:
        yield
    finally:
        following.cancel()
        await asyncio.wait([following])
        await worker.bus.close()


class Life:
    """One process of the worker."""

    def __init__(self, hub: MemoryHub, common: CommonSettings) -> None:
        engine = FakeEngine()
        self.exchange = FakeExchange(WORKER)
        engine.exchange = self.exchange
        self.worker = RunningWorker(hub, engine, common)
        self.exit = asyncio.create_task(live(self.worker.service, self.worker.main, drain_s_max=WAIT_S_MAX))

    async def ready(self) -> WorkerRecord:
        records = await self.worker.bus.key_value_store(WORKER_RECORDS)
        async with asyncio.timeout(WAIT_S_MAX):
            async for change in records.watch():
                found = change.value if change else None
                if found and found.worker_id == WORKER and found.phase is WorkerPhase.READY:
                    return found
        raise AssertionError

    async def die(self) -> None:
        self.worker.engine.reason.set_result("it was killed by SIGSEGV")
        await asyncio.wait([self.exit], timeout=WAIT_S_MAX)
        await self.worker.bus.close()

    async def stop(self) -> None:
        self.worker.service.stopping.set()
        await asyncio.wait([self.exit], timeout=WAIT_S_MAX)
        await self.worker.bus.close()


async def test_a_peer_at_whose_connection_the_engine_died_is_refused_by_the_next(common):
    hub = MemoryHub()
    async with registered(hub):
        first = Life(hub, common)
        await first.exchange.told("peers")
        await first.die()

        second = Life(hub, common)
        async with registered(hub, "honest"):
            (peer,) = await second.exchange.told("peers")
            second.exchange.tell(connected=[PeerConnected(worker_id=WorkerId("honest"), epoch=Epoch(1), seconds=0.1)])
            ready = await second.ready()
        assert peer.handshake.worker_id == "honest"
        assert "its engine died while it connected to evil" in ready.note
        await second.stop()


async def test_a_peer_that_was_connected_when_the_engine_died_is_connected_again(common):
    hub = MemoryHub()
    async with registered(hub):
        first = Life(hub, common)
        await first.exchange.told("peers")
        first.exchange.tell(connected=[PeerConnected(worker_id=EVIL, epoch=Epoch(1), seconds=0.1)])
        await first.die()

        second = Life(hub, common)
        (peer,) = await second.exchange.told("peers")
        second.exchange.tell(connected=[PeerConnected(worker_id=EVIL, epoch=Epoch(1), seconds=0.1)])
        assert peer.handshake.worker_id == "evil"
        assert "engine died" not in (await second.ready()).note
        await second.stop()


def test_a_suspect_is_forgotten_after_a_while(tmp_path):
    clock = FakeClock()
    Suspects(str(tmp_path), WORKER, clock).add([EVIL])

    clock.advance(REFUSED_S - 1.0)
    assert Suspects(str(tmp_path), WORKER, clock).refused_s() == {EVIL: pytest.approx(1.0, abs=0.01)}
    clock.advance(1.0)
    later = Suspects(str(tmp_path), WORKER, clock)
    assert (later.refused_s(), later.note) == ({}, "")


@pytest.mark.parametrize("content", [b"", b"[]", b'{"evil": "x"}', msgspec.json.encode({"evil": 1 << 60})])
def test_an_unreadable_file_refuses_nobody(tmp_path, content):
    file = suspects_file(str(tmp_path), WORKER)
    file.parent.mkdir()
    file.write_bytes(content)

    assert Suspects(str(tmp_path), WORKER, FakeClock()).refused_s() == {}


def test_a_folder_that_is_not_writable_costs_the_memory_only(tmp_path):
    (tmp_path / "suspects").write_text("no folder")

    Suspects(str(tmp_path), WORKER, FakeClock()).add([EVIL])
