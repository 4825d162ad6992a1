"""Offers that no worker will read are released at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from services.worker.legs.server import LegServer
from shared.bus.frame_sender import LegFrames
from shared.bus.port import Envelope
from shared.contracts.channels import KV_RELEASE
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import CancelLeg, LegKind, LegReport, StartLeg
from shared.contracts.kv_exchange import KvOffer, ReleaseKv
from tests.support.kv_messages import one_group
from tests.unit.worker.fakes import WAIT_S_MAX, RunningWorker, running_worker
from tests.unit.worker.kv_exchange.fakes import HASH, FakeExchange

OFFER = KvOffer(
    worker_id=WorkerId("p9"), epoch=Epoch(7), lease_id="offered", groups=one_group([0]), last_hash=HASH, until_s=9.0
)
PACKED = msgspec.msgpack.encode(OFFER)


async def released_elsewhere(worker: RunningWorker) -> asyncio.Queue[ReleaseKv]:
    """What the worker tells the holder of OFFER."""
    told: asyncio.Queue[ReleaseKv] = asyncio.Queue()
    await worker.bus.subscribe(KV_RELEASE, lambda release, _envelope: told.put_nowait(release), worker_id="p9")
    return told


@pytest.mark.parametrize("ended", [False, True], ids=["while it runs", "when its end is under way"])
async def test_a_broken_off_prefill_leg_releases_its_offer(ended: bool):
    engine = FakeExchange("w1")
    async with running_worker(engine) as worker:
        if not ended:
            worker.engine.may_run.clear()
        leg = await worker.leg(LegKind.PREFILL)
        if ended:
            await worker.read(leg)
            assert engine.every("releases") == []
            worker.inbox.cancel(leg.leg, None)
        else:
            await worker.engine.started.wait()
            leg.cancel()

        (release,) = await engine.told("releases")

    assert release.lease_ids == [worker.engine.orders[0].offer_id] == [leg.leg_id]


async def test_a_prefill_leg_cancelled_in_the_turn_of_its_end_releases_its_offer(monkeypatch: pytest.MonkeyPatch):
    start, end = LegServer.start, LegFrames.end
    cancel: list[Callable[[], object]] = []

    def start_and_note(server: LegServer, order: StartLeg, envelope: Envelope) -> None:
        cancel.append(lambda: server.cancel(CancelLeg(worker_id=order.worker_id, leg_id=order.leg_id), envelope))
        start(server, order, envelope)

    def end_and_cancel(frames: LegFrames, report: LegReport) -> None:
        end(frames, report)
        asyncio.get_running_loop().call_soon(cancel.pop())  # before the callbacks of the leg's task

    monkeypatch.setattr(LegServer, "start", start_and_note)
    monkeypatch.setattr(LegFrames, "end", end_and_cancel)
    engine = FakeExchange("w1")
    async with running_worker(engine) as worker:
        leg = await worker.leg(LegKind.PREFILL)

        (release,) = await engine.told("releases")

    assert release.lease_ids == [leg.leg_id]


@pytest.mark.parametrize("body", [{"crash": True}, {}], ids=["it fails", "it is cancelled"])
async def test_a_broken_off_decode_leg_releases_the_offer_it_would_read(body: dict[str, bool]):
    async with running_worker(FakeExchange("w1")) as worker:
        told = await released_elsewhere(worker)
        worker.engine.may_run.clear()
        leg = await worker.leg(LegKind.DECODE, body=body, kv_transfer=PACKED)
        await worker.engine.started.wait()
        leg.cancel()

        async with asyncio.timeout(WAIT_S_MAX):
            release = await told.get()

    assert (release.worker_id, release.epoch, release.lease_ids) == ("p9", 7, ["offered"])


async def test_a_decode_leg_cancelled_before_its_start_releases_its_offer():
    async with running_worker(FakeExchange("w1")) as worker:
        told = await released_elsewhere(worker)
        leg = await worker.leg(LegKind.DECODE, kv_transfer=PACKED)
        leg.cancel()  # in the same turn of the loop: the worker reads both orders before it runs anything

        async with asyncio.timeout(WAIT_S_MAX):
            release = await told.get()

    assert release.lease_ids == ["offered"]


async def test_a_refused_decode_leg_releases_its_offer():
    async with running_worker(FakeExchange("w1")) as worker:
        told = await released_elsewhere(worker)

        _frames, failure = await worker.read(await worker.leg(LegKind.DECODE, kv_transfer=PACKED, epoch=Epoch(1)))
        async with asyncio.timeout(WAIT_S_MAX):
            release = await told.get()

    assert failure is not None
    assert release.lease_ids == ["offered"]


async def test_legs_that_succeed_release_no_offer():
    engine = FakeExchange("w1")
    async with running_worker(engine) as worker:
        told = await released_elsewhere(worker)

        await worker.read(await worker.leg(LegKind.PREFILL))
        await worker.read(await worker.leg(LegKind.DECODE, kv_transfer=PACKED))

        assert engine.every("releases") == []
        assert told.empty()
