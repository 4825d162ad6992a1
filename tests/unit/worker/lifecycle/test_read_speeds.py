"""A worker publishes how fast it reads KV from its partners, within bounds that its readers check."""

from __future__ import annotations

import asyncio
from math import inf, nan

import msgspec

from connector.messages import ReadMeasured
from services.worker.lifecycle.registration import Registration
from services.worker.lifecycle.self_test import MEASURE_S_MAX, WAITING_MAX, ReadSpeeds
from services.worker.tiny_model import ensure_tiny_tokenizer
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.workers import KV_SPEED_MAX, KV_SPEEDS_MAX, KvMemory, KvReadSpeed, Role
from tests.support.fleet_builders import record
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.virtual_time import run_in_virtual_time
from tests.unit.worker.simulated_workers import workers_on_one_bus


def measured(speed: float = 2e9, failure: str = "", memory: str = "cpu") -> ReadMeasured:
    return ReadMeasured(measure_id="m", bytes=1 << 20, bytes_per_s=speed, memory=KvMemory(memory), failure=failure)


class Engine:
    """Measures what it is told to; counts how many measurements run at a time."""

    def __init__(self, result: ReadMeasured, takes_s: float = 0.0) -> None:
        self.registration = Registration(MemoryBus(MemoryHub()), record("me"))
        self.result = result
        self.takes_s = takes_s
        self.running = self.running_max = self.measured = 0

    async def measure(self, _source: WorkerId, _epoch: Epoch) -> ReadMeasured:
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        try:
            await asyncio.sleep(self.takes_s)
        finally:
            self.running -= 1
        self.measured += 1
        return self.result

    def way_from(self, source: WorkerId) -> str:
        return f"UCX to {source}"

    @property
    def listed(self) -> list[tuple[str, int, str]]:
        return [(one.source_id, one.bytes_per_s, one.memory) for one in self.registration.record.kv_reads]


async def test_the_newest_speed_of_each_source_is_published():
    engine = Engine(measured(2.5e9, memory="cuda"))
    speeds = ReadSpeeds(engine.measure, engine.registration, engine.way_from)
    await speeds.measure(WorkerId("p1"), Epoch(1))
    engine.result = measured(1e9)
    await speeds.measure(WorkerId("p2"), Epoch(1))
    await speeds.measure(WorkerId("p1"), Epoch(2))

    assert engine.listed == [("p2", 10**9, "cpu"), ("p1", 10**9, "cpu")]
    assert [one.way for one in engine.registration.record.kv_reads] == ["UCX to p2", "UCX to p1"]


async def test_the_times_of_grants_are_published():
    engine = Engine(msgspec.structs.replace(measured(), notice_s=0.002, bus_s=0.004))
    await ReadSpeeds(engine.measure, engine.registration, engine.way_from).measure(WorkerId("p1"), Epoch(1))

    (one,) = engine.registration.record.kv_reads
    assert (one.notice_s, one.bus_s) == (0.002, 0.004)


async def test_a_failed_measurement_changes_nothing():
    engine = Engine(measured())
    speeds = ReadSpeeds(engine.measure, engine.registration, engine.way_from)
    await speeds.measure(WorkerId("p1"), Epoch(1))
    engine.result = measured(failure="not connected")
    await speeds.measure(WorkerId("p1"), Epoch(1))

    assert engine.listed == [("p1", 2 * 10**9, "cpu")]


async def test_the_list_is_bounded():
    engine = Engine(measured())
    speeds = ReadSpeeds(engine.measure, engine.registration, engine.way_from)
    for number in range(KV_SPEEDS_MAX + 3):
        await speeds.measure(WorkerId(f"p{number}"), Epoch(1))

    assert [source for source, *_ in engine.listed] == [f"p{number}" for number in range(3, KV_SPEEDS_MAX + 3)]


def test_measurements_wait_for_one_another_but_not_for_ever():
    async def run() -> tuple[int, int, float]:
        engine = Engine(measured(), takes_s=2.0)
        speeds = ReadSpeeds(engine.measure, engine.registration, engine.way_from)
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(speeds.measure(WorkerId(f"p{number}"), Epoch(1)) for number in range(2 * WAITING_MAX)))
        return engine.running_max, engine.measured, asyncio.get_running_loop().time() - began

    assert run_in_virtual_time(run()) == (1, 2, MEASURE_S_MAX)


def test_impossible_speeds_of_a_record_are_ignored():
    possible = KvReadSpeed(source_id=WorkerId("p1"), bytes_per_s=7, memory=KvMemory.CPU)
    impossible = [msgspec.structs.replace(possible, bytes_per_s=speed) for speed in (-1, KV_SPEED_MAX + 1)]
    impossible += [msgspec.structs.replace(possible, notice_s=seconds) for seconds in (-1.0, nan, inf)]
    impossible += [msgspec.structs.replace(possible, bus_s=seconds) for seconds in (-1.0, nan, inf)]
    unknown = msgspec.structs.replace(possible, source_id=WorkerId("nobody"))
    told = msgspec.structs.replace(record("w1"), kv_reads=[possible, possible, *impossible, unknown])

    assert told.reads_from({WorkerId("p1"), WorkerId("w1")}) == [possible]


def test_more_speeds_than_allowed_are_cut_off():
    sources = [WorkerId(f"p{number}") for number in range(1000)]
    many = [KvReadSpeed(source_id=source, bytes_per_s=7, memory=KvMemory.CPU) for source in sources]
    told = msgspec.structs.replace(record("w1"), kv_reads=many)

    assert len(told.reads_from(set(sources))) == KV_SPEEDS_MAX


async def test_both_partners_of_a_self_test_measure(tmp_path):
    async with workers_on_one_bus(ensure_tiny_tokenizer(tmp_path)) as workers:
        workers.start("p1", Role.PREFILL)
        await workers.until_ready("p1")
        workers.start("d1", Role.DECODE)
        await workers.until_ready("p1", "d1")

        def read_by(worker_id: str) -> list[str]:
            return [one.source_id for one in workers.records[worker_id].kv_reads]

        assert (read_by("p1"), read_by("d1")) == (["d1"], ["p1"])
        assert all(isinstance(one, KvReadSpeed) for one in workers.records["d1"].kv_reads)
