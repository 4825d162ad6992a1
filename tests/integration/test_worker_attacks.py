"""What a worker can do to others with its own key: on a real nats-server, with the keys that `baton init --worker` makes.

Two kinds of attempts: in another's name on another's subject, which the server refuses; and about another's legs and leases
on the attacker's own subjects, which arrive and are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import pytest
from nats.aio.msg import Msg

from connector.messages import EngineCall
from services.worker.engines.port import Identity
from services.worker.kv_exchange.engine_calls import EngineCalls
from services.worker.kv_exchange.message_handler import MessageHandler
from shared.bus.frame_sender import FrameSender
from shared.bus.leg_inbox import LegInbox
from shared.bus.port import AskRefused
from shared.bus.wire import PART_HEADER, pack, unpack
from shared.contracts.channels import (
    FRAMES,
    KV_GRANT,
    KV_LEASE,
    KV_RELEASE,
    KV_SNAPSHOT,
    LOAD,
    RUN_SELF_TEST,
    START_LEG,
    Channel,
    Party,
)
from shared.contracts.failures import Reason
from shared.contracts.fleet_orders import RunSelfTest
from shared.contracts.inference import Frame, FrameBatch, FrameKind, LegReport, StartLeg
from shared.contracts.kv_events import AskKvSnapshot, KvSnapshot
from shared.contracts.kv_exchange import KvGrant, LeaseKv, ReleaseKv, new_lease_id
from shared.contracts.load import LoadReport
from tests.contracts.examples import example
from tests.integration.bus.worlds import until
from tests.integration.test_permissions import SOON_S, Fleet, Stranger
from tests.support.builders import start_leg
from tests.support.cluster_keys import ClusterKeys
from tests.support.pulled_legs import PulledLeg
from tests.unit.worker.kv_exchange.fakes import FakeExchange

pytestmark = pytest.mark.nats

VICTIM, ATTACKER = "w-victim", "w-attacker"
EPOCH = 1
NO_LEG: list[str] = []


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return ClusterKeys(tmp_path_factory.mktemp("keys"), VICTIM, ATTACKER)


@pytest.fixture
async def fleet(guarded, keys):
    async with Fleet(guarded, keys) as fleet:
        yield fleet


@pytest.fixture
async def attacker(guarded, keys):
    async with Attacker(guarded, keys.raw_options(f"worker.{ATTACKER}")) as attacker:
        yield attacker


class Attacker(Stranger):
    """nats-py with the attacker's own key: none of our code keeps it to the contract."""

    async def say(self, channel: Channel[Any], message: msgspec.Struct, **lies: str) -> set[str]:
        """Publish on the message's subject, with ``lies`` in place of its ids; returns the subject if it was refused."""
        self._refused.clear()
        subject = channel.address(msgspec.structs.replace(message, **lies))
        await self.publish(subject, pack(message))
        return set(self._refused)

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None) -> None:
        """The server has read it when this returns."""
        await self._nc.publish(subject, payload, headers=dict(headers or {}) or None)
        await self._sync()

    async def listen(self, subject: str, take: Callable[[Msg], Awaitable[None]]) -> None:
        """The server has read it when this returns."""
        await self._nc.subscribe(subject, cb=take)
        await self._sync()

    async def _sync(self) -> None:
        await self._nc._flush_pending(force_flush=True)  # else the PING would pass what is held back
        await self._nc.flush(SOON_S)


class Stream:
    """A leg that the victim serves for a router, with one token sent."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def begin(self) -> Stream:
        self.router, self.victim = await self._fleet.join(Party.ROUTER), await self._fleet.join(f"worker.{VICTIM}")
        self.inbox = LegInbox(self.router, "r1", leg_buffer_bytes_max=1 << 20)
        await self.inbox.open()
        started: asyncio.Future[StartLeg] = asyncio.get_running_loop().create_future()
        await self.victim.subscribe(START_LEG, lambda start, _: started.set_result(start), worker_id=VICTIM)
        self.sender = FrameSender(self.victim, VICTIM, EPOCH)
        self.leg = await PulledLeg.start(self.inbox, start_leg(new_lease_id(), worker_id=VICTIM))
        self.answer = self.sender.leg(await started)
        self.answer.head(200, "text/event-stream")
        assert [frame.kind for frame in await self.leg.frames()] == [FrameKind.HEAD]
        return self

    async def goes_on(self) -> None:
        """The victim's next tokens, and nothing else, reach the router."""
        self.answer.data(b"true")
        self.answer.end(LegReport(completion_tokens=1))
        frames = []
        while not frames or frames[-1].kind is not FrameKind.END:
            frames += await self.leg.frames()
        assert b"".join(frame.data for frame in frames) == b"true"
        assert frames[-1].report == LegReport(completion_tokens=1)

    def forged(self, worker_id: str, **fields: Any) -> FrameBatch:
        """The next frames of the leg, as the attacker would have them."""
        forged = [
            Frame(leg_id=self.leg.leg_id, seq=1, kind=FrameKind.DATA, data=b"forged"),
            Frame(leg_id=self.leg.leg_id, seq=2, kind=FrameKind.END, report=LegReport()),
        ]
        return FrameBatch(router_id="r1", worker_id=worker_id, epoch=EPOCH, **{"frames": forged, **fields})


async def test_frames_on_another_workers_subject_are_refused_by_the_server(fleet, attacker):
    async with asyncio.timeout(SOON_S):
        stream = await Stream(fleet).begin()

        assert await attacker.say(FRAMES, stream.forged(VICTIM)) == {f"frames.r1.{VICTIM}"}

        await stream.goes_on()
        assert stream.router.counts.bad_messages == 0


async def test_frames_of_another_workers_leg_are_dropped_and_counted(fleet, attacker):
    async with asyncio.timeout(SOON_S):
        stream = await Stream(fleet).begin()

        assert not await attacker.say(FRAMES, stream.forged(ATTACKER))
        assert not await attacker.say(FRAMES, stream.forged(VICTIM), worker_id=ATTACKER)

        batches, frames = 1, len(stream.forged(ATTACKER).frames)
        await until(lambda: stream.router.counts.bad_messages == frames + batches)
        await stream.goes_on()


@pytest.mark.parametrize("named", [VICTIM, ATTACKER])
async def test_an_empty_in_flight_list_breaks_off_no_stream_of_another_worker(fleet, attacker, named):
    async with asyncio.timeout(SOON_S):
        stream = await Stream(fleet).begin()
        empty = stream.forged(named, frames=[], in_flight=NO_LEG)

        refused = await attacker.say(FRAMES, empty)
        assert refused == ({f"frames.r1.{VICTIM}"} if named == VICTIM else set())
        assert not await attacker.say(FRAMES, empty, worker_id=ATTACKER)

        await stream.goes_on()
        assert stream.inbox.orphans.awaited == 0


async def test_part_of_a_message_of_another_worker_cannot_be_replaced(fleet, attacker):
    """Parts of messages are put together for each subject."""
    async with asyncio.timeout(SOON_S):
        stream = await Stream(fleet).begin()
        true = pack(stream.forged(VICTIM, frames=[], in_flight=[stream.leg.leg_id]))
        victim = stream.victim._nc
        subject = f"frames.r1.{VICTIM}"

        await victim.publish(subject, true[:10], headers={PART_HEADER: "m/0/2"})
        await stream.victim.flush(SOON_S)
        await attacker.publish(f"frames.r1.{ATTACKER}", b"forged", {PART_HEADER: "m/1/2"})
        await victim.publish(subject, true[10:], headers={PART_HEADER: "m/1/2"})

        await stream.goes_on()
        assert (stream.router.counts.bad_messages, stream.router.counts.parts_lost) == (0, 0)


async def test_a_worker_cannot_report_its_load_in_anothers_name(fleet, attacker):
    router = await fleet.join(Party.ROUTER)
    heard: list[str] = []
    await router.subscribe(LOAD, lambda report, _: heard.append(report.worker_id))
    report = msgspec.structs.replace(example(LoadReport), worker_id=VICTIM)

    assert await attacker.say(LOAD, report) == {f"worker.{VICTIM}.load"}
    assert not await attacker.say(LOAD, report, worker_id=ATTACKER)

    await until(lambda: router.counts.bad_messages)
    assert heard == []


async def test_leases_grants_and_releases_in_anothers_name_do_not_reach_a_worker(fleet, attacker):
    """The holder is a third worker, with which victim and attacker exchange KV."""
    async with asyncio.timeout(SOON_S):
        holder, engine = await fleet.join(Party.WORKER), FakeExchange("w-holder")
        calls = EngineCalls(engine, lambda _notifications: None)
        await MessageHandler(holder, Identity("w-holder", EPOCH), calls).open()
        calling = asyncio.create_task(calls.follow())
        lease = LeaseKv(worker_id="w-holder", epoch=EPOCH, reader_id=VICTIM, ask_id="a1", hashes=b"x" * 32, hold_s=1.0)
        release = ReleaseKv(worker_id="w-holder", epoch=EPOCH, reader_id=VICTIM, ask_ids=["a1"])
        grant = KvGrant(reader_id="w-holder", worker_id=VICTIM, epoch=EPOCH, ask_id="a1")

        for channel, message, sender in (
            (KV_LEASE, lease, "reader_id"),
            (KV_RELEASE, release, "reader_id"),
            (KV_GRANT, grant, "worker_id"),
        ):
            assert await attacker.say(channel, message) == {channel.address(message)}
            assert not await attacker.say(channel, message, **{sender: ATTACKER})
        await until(lambda: holder.counts.bad_messages == 3)

        own = msgspec.structs.replace(release, reader_id=ATTACKER)
        assert not await attacker.say(KV_RELEASE, own)
        assert await engine.told("releases") == [own]
        assert engine.calls == [EngineCall(releases=[own])]
        calling.cancel()


async def test_a_worker_cannot_send_another_to_a_third_for_its_self_test(attacker):
    order = RunSelfTest(worker_id="w-reader", source_id=VICTIM, source_epoch=EPOCH)

    assert await attacker.say(RUN_SELF_TEST, order) == {f"worker.w-reader.self_test.{VICTIM}"}


async def test_a_reply_in_anothers_name_is_refused_by_the_asker(fleet, attacker):
    """The attacker answers what it was asked, with the victim's id in the reply."""
    router = await fleet.join(Party.ROUTER)

    async def lie(message: Msg) -> None:
        ask = unpack(message.data, AskKvSnapshot)
        assert ask.worker_id == ATTACKER
        await message.respond(pack(KvSnapshot(worker_id=VICTIM, epoch=EPOCH, seq=1, hashes=b"")))

    await attacker.listen(KV_SNAPSHOT.filter(worker_id=ATTACKER), lie)

    with pytest.raises(AskRefused) as refused:
        await router.ask(KV_SNAPSHOT, AskKvSnapshot(worker_id=ATTACKER, epoch=EPOCH), timeout_s=SOON_S)
    assert refused.value.failure.reason is Reason.BAD_MESSAGE
