"""What `baton init` makes, on a real nats-server: each party can do its job, over TLS and by its key, and nothing else."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterable
from typing import Self

import msgspec
import nats
import pytest

from shared.bus.frame_sender import FrameSender
from shared.bus.leg_inbox import LegInbox
from shared.bus.nats_bus import connect_nats
from shared.bus.port import AskTimedOut, Bus
from shared.contracts.catalogue import files
from shared.contracts.channels import (
    CANCEL_LEG,
    CHANNELS,
    DESCRIBE_FLEET,
    FRAMES,
    KV_EVENTS,
    KV_HANDSHAKE,
    KV_SNAPSHOT,
    LEADERSHIP,
    PLACEHOLDER,
    START_LEG,
    WORKER_RECORDS,
    Channel,
    Delivery,
    Party,
)
from shared.contracts.control import Leadership
from shared.contracts.inference import FrameBatch, LegReport
from shared.contracts.kv_events import AskKvSnapshot, KvSnapshot
from shared.contracts.kv_exchange import AskKvHandshake, KvHandshake
from shared.contracts.workers import DescribeFleet, FleetState, WorkerRecord
from tests.contracts.examples import example
from tests.integration.bus.worlds import until
from tests.support.builders import kv_batch, start_leg
from tests.support.cluster_keys import ClusterKeys
from tests.support.nats_server import NatsServer, find_nats_server
from tests.support.pulled_legs import PulledLeg

pytestmark = pytest.mark.nats

SOON_S = 30.0
QUIET_S = 0.3
"""Nobody answers within so long who was not asked."""
ALONE, OTHER = "w-alone", "w-other"
"""A worker with a key of its own, and one without."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return ClusterKeys(tmp_path_factory.mktemp("keys"), ALONE)


class Fleet:
    """One connection for each party."""

    def __init__(self, server: NatsServer, keys: ClusterKeys) -> None:
        self._server = server
        self._keys = keys
        self._buses: list[Bus] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        for bus in self._buses:
            await bus.close()

    async def join(self, owner: str) -> Bus:
        bus = await connect_nats(self._server.url, name=owner, connect_s_max=SOON_S, access=self._keys.access(owner))
        self._buses.append(bus)
        return bus


async def test_a_router_and_a_worker_can_serve_a_leg(guarded, keys):
    async with Fleet(guarded, keys) as fleet, asyncio.timeout(SOON_S):
        router, worker = await fleet.join(Party.ROUTER), await fleet.join(Party.WORKER)
        inbox = LegInbox(router, "r1", leg_buffer_bytes_max=1 << 20)
        await inbox.open()
        sender = FrameSender(worker, "w1", 1)
        await worker.subscribe(START_LEG, lambda start, _: sender.leg(start).end(LegReport()), worker_id="w1")
        await worker.subscribe(CANCEL_LEG, lambda _cancel, _: None, worker_id="w1")

        leg = await PulledLeg.start(inbox, start_leg(body=b"x" * 3_000_000))

        assert len(await leg.frames()) == 1
        unreachable = asyncio.get_running_loop().create_future()
        router.on_unreachable(unreachable.set_result)
        await router.publish(START_LEG, start_leg("lost", worker_id="w2"), key="lost")
        assert await unreachable == "lost"


async def test_a_router_receives_kv_events_and_a_large_snapshot(guarded, keys):
    async with Fleet(guarded, keys) as fleet, asyncio.timeout(SOON_S):
        router, worker = await fleet.join(Party.ROUTER), await fleet.join(Party.WORKER)
        heard: asyncio.Future = asyncio.get_running_loop().create_future()
        await router.subscribe(KV_EVENTS, lambda batch, _: heard.set_result(batch))
        snapshot = KvSnapshot(worker_id="w1", epoch=1, seq=1, hashes=b"x" * 5_000_000)

        async def answer(_ask, _envelope):
            return snapshot

        await worker.answer(KV_SNAPSHOT, answer, worker_id="w1")
        await worker.publish(KV_EVENTS, kv_batch(1))

        assert await heard == kv_batch(1)
        assert await router.ask(KV_SNAPSHOT, AskKvSnapshot(worker_id="w1", epoch=1), timeout_s=SOON_S) == snapshot


async def test_the_registry_and_leadership_can_be_kept_and_watched(guarded, keys):
    async with Fleet(guarded, keys) as fleet, asyncio.timeout(SOON_S):
        worker, orchestrator = await fleet.join(Party.WORKER), await fleet.join(Party.ORCHESTRATOR)
        record = example(WorkerRecord)
        records = await worker.key_value_store(WORKER_RECORDS)
        await records.put(record)
        for party in (Party.ROUTER, Party.ORCHESTRATOR, Party.COLLECTOR, Party.LAUNCHER):
            watch = (await (await fleet.join(party)).key_value_store(WORKER_RECORDS)).watch()
            first = await anext(watch)
            assert first is not None
            assert first.value == record
        leadership = await orchestrator.key_value_store(LEADERSHIP)
        revision = await leadership.create(Leadership(role="o", leader="a", term=1))
        await leadership.update(Leadership(role="o", leader="a", term=2), revision)
        await leadership.delete("o")


async def test_the_fleet_can_be_described_to_a_launcher(guarded, keys):
    async with Fleet(guarded, keys) as fleet, asyncio.timeout(SOON_S):
        launcher, orchestrator = await fleet.join(Party.LAUNCHER), await fleet.join(Party.ORCHESTRATOR)
        state = FleetState(leader="o", term=1, workers=[])

        async def answer(_ask, _envelope):
            return state

        await orchestrator.answer(DESCRIBE_FLEET, answer)

        assert await launcher.ask(DESCRIBE_FLEET, DescribeFleet(), timeout_s=SOON_S) == state


async def test_a_router_cannot_publish_a_workers_kv_events_or_frames(guarded, keys):
    async with Fleet(guarded, keys) as fleet:
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


async def test_a_worker_cannot_read_another_workers_or_a_routers_mail(guarded, keys, caplog):
    async with Fleet(guarded, keys) as fleet:
        worker = await fleet.join(Party.WORKER)
        heard = []
        await worker.subscribe(FRAMES, lambda batch, _: heard.append(batch.worker_id), router_id="r1")

        await worker.publish(FRAMES, FrameBatch(router_id="r1", worker_id="w1", epoch=1, frames=[]))
        await worker.flush(SOON_S)
        await until(lambda: "ermissions violation" in caplog.text)

        assert heard == []


async def test_a_collector_cannot_ask_a_worker(guarded, keys):
    async with Fleet(guarded, keys) as fleet:
        collector, worker = await fleet.join(Party.COLLECTOR), await fleet.join(Party.WORKER)

        async def answer(_ask, _envelope):
            raise AssertionError("the ask came through")

        await worker.answer(KV_SNAPSHOT, answer, worker_id="w1")

        with pytest.raises(AskTimedOut):
            await collector.ask(KV_SNAPSHOT, AskKvSnapshot(worker_id="w1", epoch=1), timeout_s=QUIET_S)


class Stranger:
    """nats-py itself with somebody's key: what the server refuses is told in the order in which it was tried."""

    def __init__(self, server: NatsServer, options: dict[str, object]) -> None:
        self._server = server
        self._options = options
        self._refused: list[str] = []

    async def __aenter__(self) -> Self:
        self._nc = await nats.connect(self._server.url, error_cb=self._on_error, **self._options)
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._nc.close()

    async def _on_error(self, error: Exception) -> None:
        self._refused.append(str(error).partition('"')[2].rstrip('"'))

    async def refused(self, *, publish: Iterable[str] = (), subscribe: Iterable[str] = ()) -> set[str]:
        """Try all of these; answers what was refused."""
        self._refused.clear()
        for subject in publish:
            await self._nc.publish(subject, b"")
        for subject in subscribe:
            await self._nc.subscribe(subject)
        await self._nc._flush_pending(force_flush=True)  # else the PING would pass what is held back
        await self._nc.flush(SOON_S)  # the server says what it refuses before it answers
        return set(self._refused)


def low(tried: Iterable[str]) -> set[str]:
    """As nats-py tells errors: in small letters."""
    return {subject.lower() for subject in tried}


def subjects(worker_id: str, service: str) -> dict[str, Channel]:
    """One subject of every row of the table."""
    workers = ("worker_id", "reader_id", "source_id", "instance")
    ids = {**dict.fromkeys(workers, worker_id), "service": service}
    return {
        ("$KV." if channel.delivery is Delivery.KEY_VALUE else "")
        + PLACEHOLDER.sub(lambda found: ids.get(found[1], "x"), channel.subject): channel
        for channel in CHANNELS.values()
    }


@pytest.mark.parametrize("party", Party)
async def test_a_party_may_send_and_receive_only_what_the_table_grants(guarded, keys, party):
    own, of_others = subjects("x", party), subjects("x", "somebody")
    every = own | of_others
    may_send = {subject for subject, channel in own.items() if party in channel.senders}
    may_hear = {
        subject
        for subject, channel in every.items()
        if party in channel.receivers and channel.delivery is not Delivery.KEY_VALUE
    }

    async with Stranger(guarded, keys.raw_options(party)) as stranger:
        assert await stranger.refused(publish=every) == low(every.keys() - may_send)
        assert await stranger.refused(subscribe=every) == low(every.keys() - may_hear)


@pytest.mark.parametrize("party", Party)
async def test_no_party_may_read_others_replies_or_query_the_server(guarded, keys, party):
    forbidden = {"$SYS.REQ.SERVER.PING"}
    overheard = {">", "*.*.*", *(f"_INBOX.{other}.>" for other in Party if other is not party)}

    async with Stranger(guarded, keys.raw_options(party)) as stranger:
        assert await stranger.refused(publish=forbidden) == low(forbidden)
        assert await stranger.refused(subscribe=overheard) == low(overheard)


def between(channel: Channel, sender: str, receiver: str, service: str = "worker") -> str:
    """A subject on which this worker sends to that one."""
    ids = {"service": service, **dict.fromkeys(channel.parts, receiver), **dict.fromkeys(channel.sender_parts, sender)}
    ids["service"] = service
    subject = PLACEHOLDER.sub(lambda found: ids[found[1]], channel.subject)
    return f"$KV.{subject}" if channel.delivery is Delivery.KEY_VALUE else subject


async def test_a_workers_own_key_permits_only_its_own_subjects(guarded, keys):
    sent = {between(c, s, r): (c, s) for c in CHANNELS.values() for s in (ALONE, OTHER) for r in (ALONE, OTHER)}
    heard = {between(c, s, r): (c, r) for c in CHANNELS.values() for s in (ALONE, OTHER) for r in (ALONE, OTHER)}
    sent[between(CHANNELS["SERVICE_STATUS"], ALONE, "", "router")] = CHANNELS["SERVICE_STATUS"], OTHER
    forged = {
        subject
        for subject, (channel, sender) in sent.items()
        if Party.WORKER not in channel.senders or (channel.sender_parts and sender != ALONE)
    }
    overheard = {
        subject
        for subject, (channel, receiver) in heard.items()
        if Party.WORKER not in channel.receivers
        or channel.delivery is Delivery.KEY_VALUE
        or (set(channel.parts) - set(channel.sender_parts) and receiver != ALONE)
    }
    answers = f"_INBOX.worker.{OTHER}.>"

    async with Stranger(guarded, keys.raw_options(f"worker.{ALONE}")) as stranger:
        assert await stranger.refused(publish=sent) == low(forged)
        assert await stranger.refused(subscribe=[*heard, answers]) == low(overheard | {answers})
    assert forged - overheard
    assert overheard - forged


async def test_a_workers_own_key_permits_all_that_a_worker_does(guarded, keys):
    async with Fleet(guarded, keys) as fleet, asyncio.timeout(SOON_S):
        alone, other = await fleet.join(f"worker.{ALONE}"), await fleet.join(Party.WORKER)

        async def answer(ask, _envelope):
            return msgspec.structs.replace(example(KvHandshake), worker_id=ask.worker_id)

        for worker, name in ((alone, ALONE), (other, OTHER)):
            await worker.answer(KV_HANDSHAKE, answer, worker_id=name)
        asked = [(alone, OTHER, ALONE), (other, ALONE, OTHER)]
        answers = [
            await bus.ask(KV_HANDSHAKE, AskKvHandshake(worker_id=name, reader_id=reader), timeout_s=SOON_S)
            for bus, name, reader in asked
        ]
        record = msgspec.structs.replace(example(WorkerRecord), worker_id=ALONE)
        registry = await alone.key_value_store(WORKER_RECORDS)
        await registry.put(record)

        assert [answer.worker_id for answer in answers] == [OTHER, ALONE]
        assert (await registry.get(ALONE)).value == record
        await registry.delete(ALONE)
        assert await registry.get(ALONE) is None


def test_the_generated_file_works_on_a_server_with_passwords(tmp_path):
    users = "".join(
        f'{{ user: {party}, password: "p", permissions: ${party.upper()}_PERMISSIONS }}\n' for party in Party
    )
    (tmp_path / "permissions.conf").write_text(files()["compose/nats/permissions.conf"])
    (tmp_path / "nats.conf").write_text(f'include "permissions.conf"\nauthorization {{ users: [\n{users}] }}')

    done = subprocess.run(
        [find_nats_server(), "-t", "-c", str(tmp_path / "nats.conf")], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
