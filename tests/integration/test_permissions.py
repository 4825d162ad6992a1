"""The generated permissions on a real nats-server: each party can do its job, and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Self

import pytest

from shared.bus.nats_bus import connect_nats
from shared.bus.port import AskTimedOut, Bus
from shared.bus.streams import FrameSender, LegInbox
from shared.contracts.catalogue import files
from shared.contracts.channels import (
    CANCEL_LEG,
    DESCRIBE_FLEET,
    FRAMES,
    KV_EVENTS,
    KV_SNAPSHOT,
    LEADERSHIP,
    START_LEG,
    WORKER_RECORDS,
    Party,
)
from shared.contracts.control import Leadership
from shared.contracts.inference import FrameBatch, LegReport
from shared.contracts.kv_events import AskKvSnapshot, KvSnapshot
from shared.contracts.workers import DescribeFleet, FleetState, WorkerRecord
from tests.builders import kv_batch, start_leg
from tests.conformance.worlds import until
from tests.contracts.examples import example
from tests.nats_server import NatsServer

pytestmark = pytest.mark.nats

SOON_S = 30.0
QUIET_S = 0.3
"""Nobody answers within so long who was not asked."""


@pytest.fixture
def guarded(tmp_path: Path):
    (tmp_path / "permissions.conf").write_text(files()["compose/nats/permissions.conf"])
    users = "".join(
        f'{{ user: {party}, password: "p", permissions: ${party.upper()}_PERMISSIONS }}\n' for party in Party
    )
    config = f'include "permissions.conf"\nauthorization {{ users: [\n{users}] }}'
    with NatsServer(tmp_path, extra_config=config) as server:
        yield server


class Fleet:
    """One connection for each party."""

    def __init__(self, server: NatsServer) -> None:
        self._server = server
        self._buses: list[Bus] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        for bus in self._buses:
            await bus.close()

    async def join(self, party: Party) -> Bus:
        url = self._server.url.replace("//", f"//{party}:p@")
        bus = await connect_nats(url, name=party, connect_s_max=SOON_S)
        self._buses.append(bus)
        return bus


async def test_a_router_and_a_worker_can_serve_a_leg(guarded):
    async with Fleet(guarded) as fleet, asyncio.timeout(SOON_S):
        router, worker = await fleet.join(Party.ROUTER), await fleet.join(Party.WORKER)
        inbox = LegInbox(router, "r1", leg_buffer_bytes_max=1 << 20)
        await inbox.open()
        sender = FrameSender(worker, "w1", 1)
        await worker.subscribe(START_LEG, lambda start, _: sender.leg(start).end(LegReport()), worker_id="w1")
        await worker.subscribe(CANCEL_LEG, lambda _cancel, _: None, worker_id="w1")

        leg = await inbox.start(start_leg(body=b"x" * 3_000_000))

        assert len(await leg.frames()) == 1
        unreachable = asyncio.get_running_loop().create_future()
        router.on_unreachable(unreachable.set_result)
        await router.publish(START_LEG, start_leg("lost", worker_id="w2"), key="lost")
        assert await unreachable == "lost"


async def test_a_router_hears_kv_events_and_gets_a_large_snapshot(guarded):
    async with Fleet(guarded) as fleet, asyncio.timeout(SOON_S):
        router, worker = await fleet.join(Party.ROUTER), await fleet.join(Party.WORKER)
        heard: asyncio.Future = asyncio.get_running_loop().create_future()
        await router.subscribe(KV_EVENTS, lambda batch, _: heard.set_result(batch))
        snapshot = KvSnapshot(worker_id="w1", epoch=1, seq=1, hashes=b"x" * 5_000_000)

        async def answer(_ask, _envelope):
            return snapshot

        await worker.answer(KV_SNAPSHOT, answer, worker_id="w1")
        await worker.publish(KV_EVENTS, kv_batch(1))

        assert await heard == kv_batch(1)
        assert await router.ask(KV_SNAPSHOT, AskKvSnapshot(worker_id="w1"), timeout_s=SOON_S) == snapshot


async def test_the_registry_and_leadership_can_be_kept_and_watched(guarded):
    async with Fleet(guarded) as fleet, asyncio.timeout(SOON_S):
        worker, orchestrator = await fleet.join(Party.WORKER), await fleet.join(Party.ORCHESTRATOR)
        record = example(WorkerRecord)
        records = await worker.kept(WORKER_RECORDS, ttl_s=60.0)
        await records.put(record)
        for party in (Party.ROUTER, Party.ORCHESTRATOR, Party.COLLECTOR, Party.LAUNCHER):
            watch = (await (await fleet.join(party)).kept(WORKER_RECORDS, ttl_s=60.0)).watch()
            first = await anext(watch)
            assert first is not None
            assert first.value == record
        leadership = await orchestrator.kept(LEADERSHIP, ttl_s=60.0)
        revision = await leadership.create(Leadership(role="o", leader="a", term=1))
        await leadership.update(Leadership(role="o", leader="a", term=2), revision)
        await leadership.delete("o")


async def test_the_fleet_can_be_described_to_a_launcher(guarded):
    async with Fleet(guarded) as fleet, asyncio.timeout(SOON_S):
        launcher, orchestrator = await fleet.join(Party.LAUNCHER), await fleet.join(Party.ORCHESTRATOR)
        state = FleetState(leader="o", term=1, workers=[])

        async def answer(_ask, _envelope):
            return state

        await orchestrator.answer(DESCRIBE_FLEET, answer)

        assert await launcher.ask(DESCRIBE_FLEET, DescribeFleet(), timeout_s=SOON_S) == state


async def test_a_router_cannot_publish_a_workers_kv_events_or_frames(guarded):
    async with Fleet(guarded) as fleet:
        router, worker = await fleet.join(Party.ROUTER), await fleet.join(Party.WORKER)
        heard = []
        await router.subscribe(KV_EVENTS, lambda batch, _: heard.append(batch.seq))
        await router.subscribe(FRAMES, lambda batch, _: heard.append(batch.worker_id), router_id="r1")

        await router.publish(KV_EVENTS, kv_batch(1))
        await router.publish(FRAMES, FrameBatch(router_id="r1", worker_id="w1", epoch=1, frames=[]))
        await router.flush(SOON_S)
        await worker.publish(KV_EVENTS, kv_batch(2))
        await until(lambda: heard)

        assert heard == [2]  # what came before it was on the same connection
        assert router.connected


async def test_a_worker_cannot_read_another_workers_or_a_routers_mail(guarded, caplog):
    async with Fleet(guarded) as fleet:
        worker = await fleet.join(Party.WORKER)
        heard = []
        await worker.subscribe(FRAMES, lambda batch, _: heard.append(batch.worker_id), router_id="r1")

        await worker.publish(FRAMES, FrameBatch(router_id="r1", worker_id="w1", epoch=1, frames=[]))
        await worker.flush(SOON_S)
        await until(lambda: "ermissions violation" in caplog.text)

        assert heard == []


async def test_a_collector_cannot_ask_a_worker(guarded):
    async with Fleet(guarded) as fleet:
        collector, worker = await fleet.join(Party.COLLECTOR), await fleet.join(Party.WORKER)

        async def answer(_ask, _envelope):
            raise AssertionError("the ask came through")

        await worker.answer(KV_SNAPSHOT, answer, worker_id="w1")

        with pytest.raises(AskTimedOut):
            await collector.ask(KV_SNAPSHOT, AskKvSnapshot(worker_id="w1"), timeout_s=QUIET_S)
