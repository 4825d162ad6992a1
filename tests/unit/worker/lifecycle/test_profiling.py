"""A worker's profiles: when one begins and ends, what is noted of legs, and what is kept of traces."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path

import pytest

from services.worker.engines.port import ProfilerFailed
from services.worker.lifecycle.profiling import with_legs
from shared.contracts.channels import READ_TRACE, START_PROFILE, STOP_PROFILE
from shared.contracts.ids import RequestId
from shared.contracts.inference import LegKind
from shared.contracts.profiling import (
    PART_BYTES_MAX,
    TRACE_BYTES_MAX,
    ProfiledLeg,
    ProfileStopped,
    ReadTrace,
    StartProfile,
    StopProfile,
    TracePart,
)
from tests.unit.worker.fakes import WAIT_S_MAX, WORKER, RunningWorker, running_worker

TRACE = b'{"schemaVersion": 1, "baseTimeNanoseconds": 5000, "traceEvents": [\n {"ph": "X", "name": "aten::mm"}\n]}'


class FakeProfiler:
    """Writes one trace of so many bytes beyond its head, if any."""

    name = "a fake profiler"

    def __init__(self, folder: Path, *, padding: int = 0, fails: str = "", writes: bool = True) -> None:
        self.orders: list[tuple[str, int]] = []
        self.stops = 0
        self._folder = folder
        self._padding = padding
        self._fails = fails
        self._writes = writes

    async def start(self, profile_id: str, steps_max: int) -> None:
        if self._fails == "start":
            raise ProfilerFailed("no CUPTI")
        self.orders.append((profile_id, steps_max))

    async def stop(self) -> list[Path]:
        self.stops += 1
        if self._fails == "stop":
            raise ProfilerFailed("the engine died")
        if not self._writes:
            return []
        trace = self._folder / f"{self.stops}.json"
        with trace.open("wb") as file:
            file.write(TRACE)
            file.truncate(len(TRACE) + self._padding)
        return [trace]


async def start(worker: RunningWorker, name: str = "one", s_max: float = 60.0, steps_max: int = 9) -> str:
    order = StartProfile(worker_id=WORKER, profile_id=name, s_max=s_max, steps_max=steps_max)
    return (await worker.bus.ask(START_PROFILE, order, timeout_s=WAIT_S_MAX)).refusal


async def stop(worker: RunningWorker) -> ProfileStopped:
    return await worker.bus.ask(STOP_PROFILE, StopProfile(worker_id=WORKER), timeout_s=WAIT_S_MAX)


async def read(worker: RunningWorker, name: str, trace: int = 0, offset: int = 0) -> TracePart:
    ask = ReadTrace(worker_id=WORKER, profile_id=name, trace=trace, offset=offset)
    return await worker.bus.ask(READ_TRACE, ask, timeout_s=WAIT_S_MAX)


async def test_a_profile_has_the_legs_that_ended_and_those_that_still_run(tmp_path):
    async with running_worker() as worker:
        worker.engine.profiler = profiler = FakeProfiler(tmp_path)
        await worker.read(await worker.leg())
        assert await start(worker) == ""
        await worker.read(await worker.leg(LegKind.PREFILL))
        worker.engine.may_run.clear()
        worker.engine.started.clear()
        unfinished = await worker.leg()
        await worker.engine.started.wait()

        stopped = await stop(worker)
        again = await stop(worker)

        worker.engine.may_run.set()
        await worker.read(unfinished)
        assert profiler.orders == [("one", 9)]
        assert [(leg.request_id, leg.kind) for leg in stopped.legs] == [("q2", "prefill"), ("q3", "aggregated")]
        assert all(stopped.began_ns <= leg.began_ns <= leg.ended_ns for leg in stopped.legs)
        assert again == stopped
        data = (await read(worker, "one")).data
        assert len(data) == stopped.traces[0]
        events = json.loads(gzip.decompress(data))["traceEvents"]
        assert {"prefill q2", "aggregated q3", "aten::mm"} <= {event["name"] for event in events}


async def test_a_profile_ends_when_its_time_is_over(tmp_path):
    async with running_worker() as worker:
        worker.engine.profiler = profiler = FakeProfiler(tmp_path)
        assert await start(worker, s_max=0.01) == ""
        async with asyncio.timeout(WAIT_S_MAX):
            while await start(worker, "two"):
                await asyncio.sleep(0)
        assert profiler.stops == 1


async def test_a_second_profile_is_refused_while_one_runs_and_deletes_it_afterwards(tmp_path):
    async with running_worker() as worker:
        worker.engine.profiler = FakeProfiler(tmp_path)
        assert await start(worker) == ""
        assert "the profile one still runs" in await start(worker, "two")
        assert (await stop(worker)).profile_id == "one"
        assert await start(worker, "two") == ""
        assert "no longer has one" in (await read(worker, "one")).refusal
        assert (await stop(worker)).profile_id == "two"


@pytest.mark.parametrize(
    ("options", "why"),
    [({"name": "../x"}, "letters"), ({"s_max": 301.0}, "300 s"), ({"steps_max": 0}, "steps"), ({"s_max": 0.0}, "300")],
)
async def test_what_no_profile_may_be_is_refused(tmp_path, options, why):
    async with running_worker() as worker:
        worker.engine.profiler = profiler = FakeProfiler(tmp_path)
        assert why in await start(worker, **options)
        assert profiler.orders == []


async def test_an_engine_without_a_profiler_refuses():
    async with running_worker() as worker:
        assert "no profiler" in await start(worker)
        assert "no profile was started" in (await stop(worker)).refusal
        assert "no longer has" in (await read(worker, "one")).refusal


async def test_failures_of_the_profiler_are_told_and_the_next_profile_may_begin(tmp_path):
    async with running_worker() as worker:
        worker.engine.profiler = FakeProfiler(tmp_path, fails="start")
        assert await start(worker) == "no CUPTI"
        worker.engine.profiler = FakeProfiler(tmp_path, fails="stop")
        assert await start(worker) == ""
        assert (await stop(worker)).note == "the engine died"
        worker.engine.profiler = FakeProfiler(tmp_path, writes=False)
        assert await start(worker) == ""
        assert "wrote no trace" in (await stop(worker)).note


async def test_a_trace_that_is_too_large_is_deleted(tmp_path):
    async with running_worker() as worker:
        worker.engine.profiler = FakeProfiler(tmp_path, padding=TRACE_BYTES_MAX)
        await start(worker)
        stopped = await stop(worker)
        assert (stopped.traces, list(tmp_path.iterdir())) == ([], [])
        assert "record fewer steps" in stopped.note


async def test_parts_of_traces_are_bounded_and_checked(tmp_path):
    async with running_worker() as worker:
        worker.engine.profiler = FakeProfiler(tmp_path, padding=200 * PART_BYTES_MAX)
        await start(worker)
        (size,) = (await stop(worker)).traces
        data = b""
        while part := (await read(worker, "one", offset=len(data))).data:
            assert len(part) <= PART_BYTES_MAX
            data += part
        assert len(data) == size
        assert (await read(worker, "one", trace=1)).refusal
        assert (await read(worker, "one", offset=-1)).refusal
        assert (await read(worker, "one", offset=2**63)).refusal
        for trace in tmp_path.iterdir():
            trace.unlink()
        assert "cannot be read" in (await read(worker, "one")).refusal


def test_legs_are_on_the_clock_of_the_trace_and_in_lanes_of_their_own(tmp_path):
    trace = tmp_path / "trace.json"
    trace.write_bytes(TRACE)
    ids = ("a", "b", "c")
    legs = [
        ProfiledLeg(request_id=RequestId(one), kind=LegKind.DECODE, began_ns=began, ended_ns=ended)
        for one, began, ended in zip(ids, (6000, 7000, 9000), (9000, 8000, 9500), strict=True)
    ]

    events = json.loads(gzip.decompress(with_legs(trace, legs, "legs of d1").read_bytes()))["traceEvents"]

    slices = {event["name"]: event for event in events if event["ph"] == "X"}
    assert [(slices[f"decode {one}"]["ts"], slices[f"decode {one}"]["tid"]) for one in ids] == [
        (1.0, 1), (2.0, 2), (4.0, 1)
    ]  # fmt: skip


@pytest.mark.parametrize("content", [b'{"traceEvents": []}', b"\x89 no trace of torch", b""])
def test_what_is_no_trace_of_torch_is_kept_as_it_is(tmp_path, content):
    trace = tmp_path / "trace.json"
    trace.write_bytes(content)
    assert gzip.decompress(with_legs(trace, [], "legs of d1").read_bytes()) == content
