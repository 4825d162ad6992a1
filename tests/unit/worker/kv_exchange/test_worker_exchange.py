"""KV exchange of several workers on one bus."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from connector.messages import EngineNotification, FetchEnded, PeerConnected, PeerGone
from shared.bus.port import AskRefused
from shared.contracts.channels import KV_FETCH, KV_GRANT, KV_HANDSHAKE, KV_LEASE, KV_RELEASE, WORKER_LOST
from shared.contracts.failures import Reason
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import (
    GROUP,
    AskKvHandshake,
    FetchedKv,
    FetchKv,
    KvLayer,
    KvPlane,
    KvRank,
    NoGrant,
    ReleaseKv,
)
from shared.contracts.workers import WorkerLost
from tests.support.memory_bus import MemoryHub
from tests.unit.worker.kv_exchange.fakes import HASH, WAIT_S_MAX, OneWorker, exchange_state, exchanging, grant, lease


async def test_new_workers_connect_before_any_request():
    hub = MemoryHub()
    async with exchanging(OneWorker(hub, "w1")) as first, exchanging(OneWorker(hub, "w2")) as second:
        (peer,) = await first.engine.told("peers")
        (other,) = await second.engine.told("peers")

    assert (peer.handshake.worker_id, other.handshake.worker_id) == ("w2", "w1")
    assert 0.0 <= peer.clock_ahead_s < WAIT_S_MAX


async def test_a_handshake_out_of_bounds_does_not_reach_the_engine():
    hub = MemoryHub()
    async with exchanging(OneWorker(hub, "evil")) as evil, exchanging(OneWorker(hub, "w1")) as honest:
        evil.exchange._handshake = msgspec.structs.replace(evil.engine.handshake, blocks=-1)
        async with exchanging(OneWorker(hub, "w2")) as reader:
            (peer,) = await reader.engine.told("peers")
            while [one.worker_id for one in reader.exchange.peers.records] != ["w1"]:
                await asyncio.sleep(0.01)
            reader.exchange.peers.want([WorkerId("evil")])
            honest.engine.tell(leases=[lease("w2", "w1")])
            await reader.engine.told("leases")

            assert [one.handshake.worker_id for one in reader.engine.every("peers")] == ["w1"]
    assert peer.handshake.worker_id == "w1"


def with_metadata(worker: OneWorker, metadata: bytes) -> OneWorker:
    """Its engine loads NIXL's metadata, of which it has some itself."""
    plane = KvPlane(offset=0, head_bytes=8, heads=1, total=1)
    layers = [KvLayer(name="layer", group=GROUP, base=4096, block_stride=8, planes=[plane])]
    ranks = [KvRank(rank=0, agent=metadata, device="cpu", device_id=0, layers=layers)]
    worker.engine.handshake = msgspec.structs.replace(worker.engine.handshake, ranks=ranks)
    return worker


@pytest.mark.parametrize(("metadata", "is_refused"), [(b"segfault", True), (b"mismatch", False), (b"\xff", False)])
async def test_an_engine_does_not_get_metadata_that_fails_its_trial(metadata, is_refused):
    hub = MemoryHub()
    reader = with_metadata(OneWorker(hub, "r1", nixl_package="tests.support.fake_nixl"), b"own")
    evil, honest = with_metadata(OneWorker(hub, "evil"), metadata), with_metadata(OneWorker(hub, "w1"), b"honest")
    async with exchanging(evil), exchanging(reader):
        async with asyncio.timeout(WAIT_S_MAX):
            while not reader.exchange.peers.records:
                await asyncio.sleep(0)
            await reader.exchange.peers.settled(WorkerId("evil"), WAIT_S_MAX)
        assert is_refused == (not reader.exchange.peers.records)
        async with exchanging(honest):
            (peer,) = await reader.engine.told("peers")

        assert peer.handshake.worker_id == "w1"
        assert reader.exchange.peers.connecting() == ["w1"]


async def test_a_peer_is_settled_when_the_engine_has_connected_to_it_or_cannot():
    hub = MemoryHub()
    async with exchanging(OneWorker(hub, "w1")) as reader:
        peers = reader.exchange.peers
        await peers.settled(WorkerId("nobody"), WAIT_S_MAX)
        async with exchanging(OneWorker(hub, "w2")), exchanging(OneWorker(hub, "w3")):
            await reader.engine.told("peers", 2)
            waiting = [asyncio.create_task(peers.settled(WorkerId(name), WAIT_S_MAX)) for name in ("w2", "w3")]
            await peers.settled(WorkerId("w2"), 0.0)
            assert not any(task.done() for task in waiting)

            good = PeerConnected(worker_id=WorkerId("w2"), epoch=Epoch(1), seconds=0.1)
            bad = PeerConnected(worker_id=WorkerId("w3"), epoch=Epoch(1), failure="no byte could be read")
            reader.engine.tell(connected=[good, bad])

            async with asyncio.timeout(WAIT_S_MAX):
                await asyncio.gather(*waiting)


async def test_a_handshake_has_the_current_clock_without_an_engine_call():
    async with exchanging(OneWorker(MemoryHub(), "w1")) as worker:
        before = time.monotonic()
        ask = AskKvHandshake(worker_id=worker.worker_id, reader_id=WorkerId("r1"))
        answer = await worker.bus.ask(KV_HANDSHAKE, ask, timeout_s=WAIT_S_MAX)

        assert answer.clock_s >= before
        assert sum(call.describe for call in worker.engine.calls) == 1


async def test_an_ask_and_its_grant_go_from_engine_to_engine():
    hub = MemoryHub()
    async with exchanging(OneWorker(hub, "h1")) as holder, exchanging(OneWorker(hub, "r1")) as reader:
        reader.engine.tell(leases=[lease()])
        (arrived,) = await holder.engine.told("leases")
        holder.engine.tell(grants=[grant(arrived)])
        (granted,) = await reader.engine.told("grants")
        reader.engine.tell(releases=[ReleaseKv(worker_id="h1", epoch=1, reader_id="r1", ask_ids=["a1"])])
        (released,) = await holder.engine.told("releases")

    assert arrived == lease()
    assert granted == grant(lease())
    assert released.ask_ids == ["a1"]


async def test_messages_in_a_calls_response_are_sent_too():
    hub = MemoryHub()
    async with exchanging(OneWorker(hub, "h1")) as holder, exchanging(OneWorker(hub, "r1")) as reader:
        holder.engine.answer = lambda call: EngineNotification(grants=[grant(ask) for ask in call.leases])

        reader.engine.tell(leases=[lease()])

        assert await reader.engine.told("grants") == [grant(lease())]


async def test_an_ask_to_an_absent_holder_is_not_granted():
    async with exchanging(OneWorker(MemoryHub(), "r1")) as reader:
        reader.engine.tell(leases=[lease("nobody")])

        (nothing,) = await reader.engine.told("grants")

    assert (nothing.reason, nothing.final, nothing.groups) == (NoGrant.UNREACHABLE, True, [])


async def test_a_lost_connection_ends_open_asks_and_new_ones_at_once():
    hub = MemoryHub()
    async with exchanging(OneWorker(hub, "h1")) as holder, exchanging(OneWorker(hub, "r1")) as reader:
        reader.engine.tell(leases=[lease(ask_id="before")])
        await holder.engine.told("leases")

        reader.bus.lose()
        reader.engine.tell(leases=[lease(ask_id="after")])

        ended = await reader.engine.told("grants", 2)
        reader.bus.restore()

    assert [(one.ask_id, one.reason) for one in ended] == [
        ("before", NoGrant.UNREACHABLE),
        ("after", NoGrant.UNREACHABLE),
    ]


async def test_blocks_whose_grant_cannot_be_sent_do_not_stay_pinned():
    async with exchanging(OneWorker(MemoryHub(), "h1")) as holder:
        holder.bus.lose()
        holder.engine.tell(grants=[grant(lease())])

        (released,) = await holder.engine.told("releases")
        holder.bus.restore()

    assert (released.worker_id, released.ask_ids) == ("h1", ["a1"])


async def test_unsent_releases_are_sent_after_the_reconnect():
    hub = MemoryHub()
    async with exchanging(OneWorker(hub, "h1")) as holder, exchanging(OneWorker(hub, "r1")) as reader:
        reader.bus.lose()
        reader.engine.tell(releases=[ReleaseKv(worker_id="h1", epoch=1, reader_id="r1", ask_ids=["a1"])])
        for _turn in range(10):
            await asyncio.sleep(0)

        reader.bus.restore()

        (released,) = await holder.engine.told("releases")
        assert released.ask_ids == ["a1"]


async def test_an_ask_for_an_earlier_epoch_is_refused_without_the_engine():
    hub = MemoryHub()
    async with exchanging(OneWorker(hub, "h1", epoch=2)) as holder, exchanging(OneWorker(hub, "r1")) as reader:
        reader.engine.tell(leases=[lease(epoch=1)])
        (nothing,) = await reader.engine.told("grants")
        await holder.bus.publish(KV_RELEASE, ReleaseKv(worker_id="h1", epoch=1, reader_id="r1", lease_ids=["old"]))
        reader.engine.tell(leases=[lease(epoch=2, ask_id="a2")])
        await holder.engine.told("leases")

    assert nothing.reason is NoGrant.EPOCH
    assert [ask.ask_id for ask in holder.engine.every("leases")] == ["a2"]
    assert holder.engine.every("releases") == []


async def test_an_unasked_grant_is_released_and_not_used():
    hub = MemoryHub()
    async with exchanging(OneWorker(hub, "h1")) as holder, exchanging(OneWorker(hub, "r1")) as reader:
        await holder.bus.publish(KV_GRANT, grant(lease(ask_id="of-an-earlier-life")))

        (released,) = await holder.engine.told("releases")

        assert released.ask_ids == ["of-an-earlier-life"]
        assert reader.engine.every("grants") == []


async def test_malformed_messages_are_ignored():
    hub = MemoryHub()
    async with exchanging(OneWorker(hub, "h1")) as holder, exchanging(OneWorker(hub, "r1")) as reader:
        for subject in ("kv.h1.lease.r1", "kv.h1.release.r1", "kv.h1.grant.r1", "kv.h1.fetch.r1"):
            hub.deliver(subject, b"\xc1 garbage", {})
        await reader.bus.publish(KV_LEASE, lease(hashes=b"not a hash"))
        reader.engine.tell(leases=[lease()])

        assert await holder.engine.told("leases") == [lease()]


async def test_calls_of_one_loop_turn_are_merged():
    hub = MemoryHub()
    async with exchanging(OneWorker(hub, "h1")) as holder, exchanging(OneWorker(hub, "r1")) as reader:
        reader.engine.tell(leases=[lease(ask_id=f"a{number}") for number in range(50)])
        await holder.engine.told("leases", 50)

        assert len([call for call in holder.engine.calls if call.leases]) < 10


async def test_calls_to_a_busy_engine_wait_and_are_merged():
    hub = MemoryHub()
    async with exchanging(OneWorker(hub, "h1")) as holder, exchanging(OneWorker(hub, "r1")) as reader:
        await holder.engine.told("peers")
        holder.engine.may_run.clear()
        for number in range(40):
            reader.engine.tell(leases=[lease(ask_id=f"a{number}")])
            for _turn in range(5):
                await asyncio.sleep(0)
        holder.engine.may_run.set()
        arrived = await holder.engine.told("leases", 40)

    assert [ask.ask_id for ask in arrived] == [f"a{number}" for number in range(40)]
    assert len([call for call in holder.engine.calls if call.leases]) <= 10


async def test_an_idle_engine_is_woken_when_its_next_lease_ends():
    async with exchanging(OneWorker(MemoryHub(), "h1")) as holder:
        await asyncio.sleep(0)
        calls = len(holder.engine.calls)
        holder.engine.answer = lambda _call: EngineNotification(state=exchange_state())
        ends_at = time.monotonic() + 0.05

        holder.engine.tell(state=exchange_state(pinned_blocks=3, next_expiry_s=ends_at))
        async with asyncio.timeout(WAIT_S_MAX):
            await holder.exchange.unpinned()

        assert time.monotonic() >= ends_at
        assert len(holder.engine.calls) == calls + 1


async def test_a_request_retries_its_peers_handshake_at_once():
    hub = MemoryHub()
    async with exchanging(OneWorker(hub, "r1")) as reader, exchanging(OneWorker(hub, "h1")):
        await reader.engine.told("peers")

        reader.engine.tell(unknown_peers=["h1"])

        assert len(await reader.engine.told("peers", 2)) == 2


async def test_a_peer_that_cannot_be_connected_is_asked_again_later():
    hub = MemoryHub()
    async with exchanging(OneWorker(hub, "r1")) as reader, exchanging(OneWorker(hub, "h1")):
        await reader.engine.told("peers")

        reader.engine.tell(connected=[PeerConnected(worker_id="h1", epoch=1, failure="no route")], unknown_peers=["h1"])
        for _turn in range(50):
            await asyncio.sleep(0)

        assert len(reader.engine.every("peers")) == 1


async def test_a_lost_peer_is_forgotten_and_its_next_epoch_connected():
    hub = MemoryHub()
    async with exchanging(OneWorker(hub, "r1")) as reader:
        async with exchanging(OneWorker(hub, "h1", epoch=1)):
            await reader.engine.told("peers")
        await reader.bus.publish(WORKER_LOST, WorkerLost(worker_id=WorkerId("h1"), epoch=Epoch(1), silent_s=3.0))
        ended = await reader.engine.told("gone")
        async with exchanging(OneWorker(hub, "h1", epoch=2)):
            peers = await reader.engine.told("peers", 2)

    assert ended == [PeerGone(worker_id="h1", epoch=1)]
    assert [peer.handshake.epoch for peer in peers] == [1, 2]


async def test_blocks_are_fetched_by_command():
    fetch = FetchKv(worker_id="w1", sender_id="w2", hashes=HASH, sources=[], deadline_s=1.0)
    async with exchanging(OneWorker(MemoryHub(), "w1")) as worker:
        result = FetchedKv(held=1)
        worker.engine.answer = lambda call: EngineNotification(
            fetched=[FetchEnded(fetch_id=one.fetch_id, result=result) for one in call.fetches]
        )

        assert await worker.bus.ask(KV_FETCH, fetch, timeout_s=WAIT_S_MAX) == result


@pytest.mark.parametrize(
    "wrong", [{"hashes": b"x"}, {"hashes": b""}, {"deadline_s": -1.0}, {"deadline_s": 1e9}], ids=str
)
async def test_a_malformed_fetch_is_refused(wrong):
    fetch = FetchKv(**{"worker_id": "w1", "sender_id": "w2", "hashes": HASH, "sources": [], "deadline_s": 1.0, **wrong})
    async with exchanging(OneWorker(MemoryHub(), "w1")) as worker:
        with pytest.raises(AskRefused) as refused:
            await worker.bus.ask(KV_FETCH, fetch, timeout_s=WAIT_S_MAX)

        assert refused.value.failure.reason is Reason.BAD_MESSAGE
        assert worker.engine.every("fetches") == []


async def test_a_draining_worker_unpins_everything_and_grants_nothing():
    hub = MemoryHub()
    async with exchanging(OneWorker(hub, "h1")) as holder, exchanging(OneWorker(hub, "r1")) as reader:
        await holder.exchange.release_all()
        reader.engine.tell(leases=[lease()])
        (nothing,) = await reader.engine.told("grants")

        assert [call.release_all for call in holder.engine.calls].count(True) == 1
        assert nothing.reason is NoGrant.DRAINING
        assert holder.engine.every("leases") == []


async def test_the_last_ledger_state_is_available():
    async with exchanging(OneWorker(MemoryHub(), "w1")) as worker:
        changes = []
        worker.exchange.on_changed(lambda: changes.append(worker.exchange.state.pinned_blocks))

        worker.engine.tell(state=exchange_state(pinned_blocks=3))
        worker.engine.tell(grants=[])
        worker.engine.tell(state=exchange_state(pinned_blocks=0))

    assert changes == [3, 0]


async def test_an_older_state_that_arrives_late_is_ignored():
    async with exchanging(OneWorker(MemoryHub(), "w1")) as worker:
        worker.engine.tell(state=exchange_state(pinned_blocks=0, leases_granted_total=1, leases_released_total=1))
        worker.engine.tell(state=exchange_state(pinned_blocks=3, leases_granted_total=1))

        assert worker.exchange.state.pinned_blocks == 0
