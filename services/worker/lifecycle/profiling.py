"""Profiles of the engine: the profiler that an operator starts on several workers at once, the legs that ran meanwhile,
and the traces, in which these legs are shown beside what the engine did.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from services.worker.engines.port import Engine, ProfilerFailed
from services.worker.legs.server import LegServer
from services.worker.lifecycle.registration import WorkerStatus
from shared.bus.port import Envelope
from shared.contracts.channels import READ_TRACE, START_PROFILE, STOP_PROFILE
from shared.contracts.fleet_orders import OrderTaken
from shared.contracts.ids import is_subject_token
from shared.contracts.inference import LegReport, StartLeg
from shared.contracts.profiling import (
    LEGS_NOTED_MAX,
    PART_BYTES_MAX,
    PARTS_NOTED_MAX,
    PROFILE_S_MAX,
    PROFILE_STEPS_MAX,
    TRACE_BYTES_MAX,
    TRACES_MAX,
    LegPart,
    ProfiledLeg,
    ProfileStopped,
    ReadTrace,
    StartProfile,
    StopProfile,
    TracePart,
)
from shared.runtime.service import Service
from shared.telemetry.profile_events import leg_events
from shared.telemetry.tracing import engine_intervals, exchange_intervals
from shared.text.formats import in_bytes

log = logging.getLogger("baton.worker")

HEAD_BYTES_MAX = 64 * 1024
"""Length of the beginning of a trace in which its list of events begins."""
EVENTS = re.compile(rb'"traceEvents":\s*\[\s*(?!\])')
BASE_NS = re.compile(rb'"baseTimeNanoseconds":\s*(\d+)')
LEGS_PID = 1_000_000_000
"""Process id of the legs in a trace; Linux gives none as great."""
COMPRESSION = 1
"""Level of gzip: of traces, level 6 leaves 20 % less and takes three times as long."""
NO_PROFILE = "no profile was started on it since its engine was"


@dataclass(slots=True)
class Running:
    profile_id: str
    s_max: float
    began_ns: int
    legs: list[ProfiledLeg] = field(default_factory=list)
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """A profile that has ended, with the files of its traces."""

    stopped: ProfileStopped
    traces: Sequence[Path]


class ProfileHandler:
    """Answers START_PROFILE, STOP_PROFILE and READ_TRACE. The newest profile is kept until the next one begins."""

    def __init__(self, service: Service, engine: Engine, server: LegServer, status: WorkerStatus) -> None:
        self._service = service
        self._engine = engine
        self._server = server
        self._status = status
        self._running: Running | None = None
        self._written: Written | None = None
        self._changing = asyncio.Lock()
        self._has_changed = asyncio.Event()

    async def open(self) -> None:
        bus, worker_id = self._service.bus, self._status.record.worker_id
        await bus.answer(START_PROFILE, self._start, worker_id=worker_id)
        await bus.answer(STOP_PROFILE, self._stop, worker_id=worker_id)
        await bus.answer(READ_TRACE, self._read, worker_id=worker_id)

    async def follow(self) -> None:
        """Stop each profile when its time is over."""
        while True:
            running = self._running
            self._has_changed.clear()
            try:
                async with asyncio.timeout(None if running is None else running.s_max):
                    await self._has_changed.wait()
            except TimeoutError:
                async with self._changing:
                    if running is self._running and running is not None:
                        await self._end(running)

    async def _start(self, order: StartProfile, _envelope: Envelope) -> OrderTaken:
        async with self._changing:
            refusal = self._why_not(order) or await self._begin(order)
        log.info("ordered to profile the engine for %g s (%s): %s", order.s_max, order.profile_id, refusal or "begun")
        record = self._status.record
        return OrderTaken(worker_id=record.worker_id, epoch=record.epoch, refusal=refusal)

    def _why_not(self, order: StartProfile) -> str:
        if self._engine.profiler is None:
            return f"its engine ({self._status.record.engine}) has no profiler that a worker could start"
        if self._running is not None:
            return f"the profile {self._running.profile_id} still runs: stop it first (`baton profile stop`)"
        if not is_subject_token(order.profile_id):
            return "the profile's name may have letters, digits, '-' and '_' only"
        if not 0.0 < order.s_max <= PROFILE_S_MAX or not 0 < order.steps_max <= PROFILE_STEPS_MAX:
            return f"a profile has at most {PROFILE_S_MAX:g} s and {PROFILE_STEPS_MAX} steps"
        return ""

    async def _begin(self, order: StartProfile) -> str:
        """Returns why the profiler did not start; empty if it did."""
        assert self._engine.profiler is not None
        self._written = None
        try:
            await self._engine.profiler.start(order.profile_id, order.steps_max)
        except ProfilerFailed as failed:
            return str(failed)
        self._running = Running(order.profile_id, order.s_max, self._wall_ns(self._service.clock.now()))
        self._server.on_served(self._served)
        self._has_changed.set()
        return ""

    async def _stop(self, _order: StopProfile, _envelope: Envelope) -> ProfileStopped:
        async with self._changing:
            if self._running is not None:
                await self._end(self._running)
            if self._written is not None:
                return self._written.stopped
        record = self._status.record
        return ProfileStopped(worker_id=record.worker_id, epoch=record.epoch, refusal=NO_PROFILE)

    async def _end(self, running: Running) -> None:
        assert self._engine.profiler is not None
        self._server.each_running(self._served)
        self._server.on_served(None)
        record, ended_ns, note = self._status.record, self._wall_ns(self._service.clock.now()), ""
        traces: list[Path] = []
        try:
            written = await self._engine.profiler.stop()
            name = f"legs of {record.worker_id} ({record.role.value})"
            traces, note = await asyncio.to_thread(compressed, written[:TRACES_MAX], running.legs, name)
            note = note or ("" if traces else f"{self._engine.profiler.name} wrote no trace: see the worker's log")
        except ProfilerFailed as failed:
            note = str(failed)
        except OSError as error:
            note = f"the traces could not be written: {error}"
        stopped = ProfileStopped(
            worker_id=record.worker_id,
            epoch=record.epoch,
            profile_id=running.profile_id,
            role=record.role,
            model=record.models[0] if record.models else "",
            engine=f"{record.engine} {record.fingerprint.engine_version}, {self._engine.profiler.name}",
            host=record.host,
            began_ns=running.began_ns,
            ended_ns=ended_ns,
            traces=[path.stat().st_size for path in traces],
            legs=running.legs,
            legs_left_out=running.left_out,
            note=note,
        )
        self._running, self._written = None, Written(stopped, traces)
        self._has_changed.set()
        log.info("the profile %s has ended: %d traces, %d legs", running.profile_id, len(traces), len(running.legs))

    def _served(self, start: StartLeg, trace_id: str, report: LegReport, arrived: float) -> None:
        running = self._running
        if running is None:
            return
        if len(running.legs) >= LEGS_NOTED_MAX:
            running.left_out += 1
            return
        now = self._service.clock.now()
        intervals = [*engine_intervals(report, arrived), *(exchange_intervals(report.kv, now) if report.kv else ())]
        running.legs.append(
            ProfiledLeg(
                request_id=start.request_id,
                kind=start.kind,
                began_ns=self._wall_ns(arrived),
                ended_ns=self._wall_ns(arrived + report.total_s),
                first_token_ns=self._wall_ns(arrived + report.first_token_s) if report.first_token_s else 0,
                trace_id=trace_id,
                parts=[
                    LegPart(name=one.name, began_ns=self._wall_ns(one.begun_at), ended_ns=self._wall_ns(one.ended_at))
                    for one in intervals[:PARTS_NOTED_MAX]
                ],
            )
        )

    def _wall_ns(self, at: float) -> int:
        """An instant of the monotonic clock on the wall clock, which the engine's traces have."""
        clock = self._service.clock
        return round((clock.wall_s() - clock.now() + at) * 1e9)

    async def _read(self, ask: ReadTrace, _envelope: Envelope) -> TracePart:
        record, written, data, refusal = self._status.record, self._written, b"", ""
        if written is None or written.stopped.profile_id != ask.profile_id:
            refusal = f"it no longer has {ask.profile_id}"
        elif not 0 <= ask.trace < len(written.traces) or not 0 <= ask.offset <= written.stopped.traces[ask.trace]:
            refusal = "it has no such trace, or no such part of it"
        else:
            try:
                data = await asyncio.to_thread(part_of, written.traces[ask.trace], ask.offset)
            except OSError as error:
                refusal = f"the trace cannot be read: {error}"
        return TracePart(worker_id=record.worker_id, epoch=record.epoch, data=data, refusal=refusal)


def part_of(trace: Path, offset: int) -> bytes:
    with trace.open("rb") as file:
        file.seek(offset)
        return file.read(PART_BYTES_MAX)


def compressed(traces: Sequence[Path], legs: Sequence[ProfiledLeg], name: str) -> tuple[list[Path], str]:
    """Each trace with the legs in it, and a remark about those that are too large. Raises OSError."""
    done, note = [], ""
    for trace in traces:
        if (size := trace.stat().st_size) > TRACE_BYTES_MAX:
            note = (
                f"a trace of {in_bytes(size)} was deleted, the most is {in_bytes(TRACE_BYTES_MAX)}: record fewer steps"
            )
        else:
            done.append(with_legs(trace, legs, name))
        trace.unlink()
    return done, note


def with_legs(trace: Path, legs: Sequence[ProfiledLeg], name: str) -> Path:
    """A compressed copy of a trace of torch with the legs as a process of their own. Raises OSError."""
    copy = trace.with_name(f"{trace.name}.gz")
    with trace.open("rb") as source, gzip.open(copy, "wb", compresslevel=COMPRESSION) as target:
        head = source.read(HEAD_BYTES_MAX)
        if found := EVENTS.search(head):
            base = BASE_NS.search(head)
            events = leg_events(legs, pid=LEGS_PID, name=name, base_ns=int(base[1]) if base else 0)
            encoded = b"".join(msgspec.json.encode(event) + b",\n" for event in events)
            head = head[: found.end()] + encoded + head[found.end() :]
        target.write(head)
        shutil.copyfileobj(source, target, PART_BYTES_MAX)
    return copy
