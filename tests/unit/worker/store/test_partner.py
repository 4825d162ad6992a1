"""Which workers a store keeps copies for."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import msgspec
import pytest

from services.worker.engines.port import EngineRefused
from services.worker.engines.store.engine import (
    ORPHAN_S,
    check_same_backend,
    find_partner,
    fitting,
    wait_until_orphaned,
)
from shared.contracts.channels import KV_HANDSHAKE, WORKER_RECORDS
from shared.contracts.ids import WorkerId
from shared.contracts.workers import WORKER_RECORD_TTL_S, Role, WorkerPhase, WorkerRecord
from tests.support.fleet_builders import record
from tests.support.kv_engines import RankMemory, Shape, handshake
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.virtual_time import run_in_virtual_time

SHAPE = Shape(layers=2)
ME = WorkerId("s1")


def of(worker_id: str, revision: str = "r", **fields) -> WorkerRecord:
    one = record(worker_id, connector="baton-1/nixl", **fields)
    return msgspec.structs.replace(one, fingerprint=msgspec.structs.replace(one.fingerprint, revision=revision))


async def register(bus: MemoryBus, *records: WorkerRecord) -> None:
    worker_records = await bus.key_value_store(WORKER_RECORDS)
    for one in records:
        await worker_records.put(one)


async def describe(bus: MemoryBus, one: WorkerRecord, fingerprint: str = "") -> None:
    """Have the worker answer for its handshake."""
    told = handshake([RankMemory(SHAPE, 0).described()], SHAPE, worker_id=one.worker_id, epoch=one.epoch)
    told = msgspec.structs.replace(told, fingerprint=fingerprint or one.fingerprint.key())

    async def answer(_ask, _envelope):
        return told

    await bus.answer(KV_HANDSHAKE, answer, worker_id=one.worker_id)


def test_a_partner_serves_the_model_and_exchanges_kv_by_content():
    good = of("w1")
    others = [
        of("s2", role=Role.STORE),
        of("w2", phase=WorkerPhase.STARTING),
        of("w3", models=("other",)),
        record("w4", connector="nixl-2"),
    ]
    others[2] = msgspec.structs.replace(
        others[2], fingerprint=msgspec.structs.replace(others[2].fingerprint, model="other")
    )

    assert fitting([*others, good], "m") == [good]
    assert fitting([good], "/models/m") == [good]


@pytest.mark.parametrize(
    ("own", "theirs", "fits"),
    [("UCX", "", True), ("LIBFABRIC", "/LIBFABRIC", True), ("UCX", "/LIBFABRIC", False), ("LIBFABRIC", "", False)],
)
def test_a_store_moves_kv_as_its_partner_does(own: str, theirs: str, fits: bool):
    partner = record("w1", connector=f"baton-2/nixl-1.5.1{theirs}")
    refusing = nullcontext() if fits else pytest.raises(EngineRefused, match=r"WORKER_KV_BACKEND=.*the worker w1")

    with refusing:
        check_same_backend(own, partner)


def test_workers_that_started_first_are_asked_first():
    assert [one.worker_id for one in fitting([of("w1", epoch=9), of("w2", epoch=2)], "m")] == ["w2", "w1"]


def test_a_store_waits_for_a_handshake_with_a_block_shape():
    async def scenario():
        bus, one = MemoryBus(MemoryHub()), of("w1")
        finding = asyncio.create_task(find_partner(bus, ME, "m"))
        await asyncio.sleep(5)
        assert not finding.done()
        await register(bus, one)  # and answers nobody
        await asyncio.sleep(5)
        assert not finding.done()
        await describe(bus, one)
        await register(bus, one)
        partner = await finding
        await bus.close()
        return partner

    partner = run_in_virtual_time(scenario())

    assert (partner.record.worker_id, len(partner.shape.layers)) == ("w1", 2)


def test_a_handshake_of_another_fingerprint_is_no_partner():
    async def scenario():
        bus, wrong, right = MemoryBus(MemoryHub()), of("w1"), of("w2")
        await register(bus, wrong, right)
        await describe(bus, wrong, fingerprint="another")
        await describe(bus, right)
        partner = await find_partner(bus, ME, "m")
        await bus.close()
        return partner

    assert run_in_virtual_time(scenario()).record.worker_id == "w2"


def test_a_store_ends_when_its_fingerprint_has_been_gone_long_enough():
    async def scenario():
        bus, old, new = MemoryBus(MemoryHub()), of("w1"), of("w2", revision="r2")
        await bus.make_bucket(WORKER_RECORDS, ttl_s=WORKER_RECORD_TTL_S)
        watch = asyncio.create_task(wait_until_orphaned(bus, old.fingerprint.key(), "m"))
        for fleet in ([old], [old, new], []):
            for _ in range(30):
                await register(bus, *fleet)
                await asyncio.sleep(5)
            assert not watch.done()
        began = asyncio.get_running_loop().time()
        while not watch.done():
            await register(bus, new)
            await asyncio.sleep(1)
        await bus.close()
        return asyncio.get_running_loop().time() - began

    assert ORPHAN_S <= run_in_virtual_time(scenario()) <= ORPHAN_S + 25
