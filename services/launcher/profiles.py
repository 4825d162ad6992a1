"""Profiles of the running system's engines: start and stop them over the bus, and put the traces into one folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from services.launcher.bus_client import CommandFailed, describe_fleet, open_bus
from shared.bus.port import AskRefused, AskTimedOut, Bus, NoResponders
from shared.contracts.channels import READ_TRACE, START_PROFILE, STOP_PROFILE, AskChannel
from shared.contracts.ids import WorkerId, is_subject_token
from shared.contracts.message import Message
from shared.contracts.profiling import (
    LEGS_NOTED_MAX,
    PART_BYTES_MAX,
    TRACE_BYTES_MAX,
    TRACES_MAX,
    ProfileStopped,
    ReadTrace,
    StartProfile,
    StopProfile,
)
from shared.contracts.workers import Role, WorkerPhase
from shared.telemetry.profile_events import handoff_events, leg_events

M = TypeVar("M", bound=Message)
A = TypeVar("A", bound=Message)

START_S_MAX = 60.0
"""Longest wait until a profiler has started: the first start loads its libraries, between two steps."""
STOP_S_MAX = 300.0
"""Longest wait until an engine has written its traces."""
READ_S_MAX = 30.0
TIMELINE, INDEX = "timeline.json", "index.json"


@dataclass(frozen=True)
class Chosen:
    """Which workers; without any choice all that serve."""

    workers: Sequence[WorkerId] = ()
    role: Role | None = None
    model: str = ""


@dataclass
class Begun:
    profile_id: str
    workers: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Why a worker is not profiled."""


@dataclass
class Collected:
    folder: str
    files: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    """What is missing of a worker, and why."""
    requests: int = 0


async def start(nats_url: str, chosen: Chosen, profile_id: str, s_max: float, steps_max: int) -> Begun:
    """Start the profilers of these workers, at the same time. Raises CommandFailed, BusError."""
    begun = Begun(profile_id)
    async with open_bus(nats_url) as bus:

        async def order(worker_id: WorkerId) -> None:
            ask = StartProfile(worker_id=worker_id, profile_id=profile_id, s_max=s_max, steps_max=steps_max)
            answer = await _ask(bus, START_PROFILE, ask, START_S_MAX)
            if why := answer if isinstance(answer, str) else answer.refusal:
                begun.refused[worker_id] = why
            else:
                begun.workers.append(worker_id)

        await _each(await _workers(bus, chosen), order)
    return begun


async def stop(nats_url: str, chosen: Chosen, to: Path) -> list[Collected]:
    """End the profiles of these workers, and copy the traces into a folder for each profile below ``to``. Raises
    CommandFailed, BusError, OSError.
    """
    stopped: list[ProfileStopped] = []
    refused: dict[str, str] = {}
    async with open_bus(nats_url) as bus:

        async def order(worker_id: WorkerId) -> None:
            answer = await _ask(bus, STOP_PROFILE, StopProfile(worker_id=worker_id), STOP_S_MAX)
            if isinstance(answer, str) or answer.refusal:
                refused[worker_id] = answer if isinstance(answer, str) else answer.refusal
            else:
                stopped.append(_checked(answer))

        await _each(await _workers(bus, chosen), order)
        if not stopped:
            raise CommandFailed("There is no profile. " + "; ".join(f"{one}: {why}" for one, why in refused.items()))
        found = {one.profile_id for one in stopped}
        return [
            await _collect(bus, [each for each in stopped if each.profile_id == one], to / one) for one in sorted(found)
        ]


async def _each(workers: Sequence[WorkerId], order: Callable[[WorkerId], Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for worker_id in workers:
            tasks.create_task(order(worker_id), name=f"profile-{worker_id}")


async def _workers(bus: Bus, chosen: Chosen) -> list[WorkerId]:
    if chosen.workers:
        return list(chosen.workers)
    fleet = await describe_fleet(bus)
    serving = {WorkerPhase.PROBING, WorkerPhase.READY, WorkerPhase.DRAINING}
    found = [
        worker.record.worker_id
        for worker in fleet.state.workers
        if worker.phase in serving
        and worker.record.role is not Role.STORE
        and chosen.role in (None, worker.record.role)
        and (not chosen.model or chosen.model in worker.record.models)
    ]
    if not found:
        raise CommandFailed("No worker that serves is chosen: see `baton workers`.")
    return found


async def _ask(bus: Bus, channel: AskChannel[M, A], ask: M, s_max: float) -> A | str:
    """The answer, or why there is none."""
    try:
        return await bus.ask(channel, ask, timeout_s=s_max)
    except NoResponders:
        return "no such worker is running, or it is of an earlier version"
    except AskTimedOut:
        return f"it did not answer within {s_max:g} s: see its log"
    except AskRefused as refused:
        return str(refused)


def _checked(stopped: ProfileStopped) -> ProfileStopped:
    """Names and numbers of a worker become a path and a size here. Raises CommandFailed."""
    if not is_subject_token(stopped.profile_id) or not is_subject_token(stopped.worker_id):
        raise CommandFailed(f"{stopped.worker_id!r} answers with an unusable name of its profile.")
    if len(stopped.traces) > TRACES_MAX or any(not 0 <= size <= TRACE_BYTES_MAX for size in stopped.traces):
        raise CommandFailed(f"{stopped.worker_id} answers with too many or too large traces.")
    return msgspec.structs.replace(stopped, legs=stopped.legs[:LEGS_NOTED_MAX])


async def _collect(bus: Bus, stopped: Sequence[ProfileStopped], folder: Path) -> Collected:
    """One profile."""
    folder.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240  # nobody else uses this loop
    done = Collected(str(folder), notes={one.worker_id: one.note for one in stopped if one.note})
    index, ordered = [], sorted(stopped, key=lambda each: each.worker_id)
    for one in ordered:
        names = []
        for number, size in enumerate(one.traces):
            name = f"{one.worker_id}{f'-{number}' if len(one.traces) > 1 else ''}.pt.trace.json.gz"
            if why := await _copy(bus, one, number, size, folder / name):
                done.notes[one.worker_id] = why
            else:
                names.append(name)
        done.files += names
        index.append(
            {
                "worker": one.worker_id,
                "role": one.role.value,
                "model": one.model,
                "engine": one.engine,
                "host": one.host,
                "traces": names,
                "began_ns": one.began_ns,
                "ended_ns": one.ended_ns,
                "requests": sorted({leg.request_id for leg in one.legs}),
                "legs_left_out": one.legs_left_out,
                "note": done.notes.get(one.worker_id, ""),
            }
        )
    (folder / TIMELINE).write_bytes(timeline(ordered))
    about = {"profile": folder.name, "timeline": TIMELINE, "workers": index}
    (folder / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(about)) + b"\n")
    done.files += [TIMELINE, INDEX]
    done.requests = len({leg.request_id for one in stopped for leg in one.legs})
    return done


async def _copy(bus: Bus, stopped: ProfileStopped, trace: int, size: int, path: Path) -> str:
    """Returns why the trace was not copied; empty if it was. Raises OSError."""
    with path.open("wb") as file:
        while (offset := file.tell()) < size:
            ask = ReadTrace(worker_id=stopped.worker_id, profile_id=stopped.profile_id, trace=trace, offset=offset)
            answer = await _ask(bus, READ_TRACE, ask, READ_S_MAX)
            if isinstance(answer, str) or answer.refusal or not 0 < len(answer.data) <= PART_BYTES_MAX:
                path.unlink()  # noqa: ASYNC240
                return answer if isinstance(answer, str) else answer.refusal or "its trace is shorter than it says"
            file.write(answer.data)
    return ""


def timeline(stopped: Sequence[ProfileStopped]) -> bytes:
    """The legs of all workers as one trace, with an arrow for each handoff."""
    base_ns = min((one.began_ns for one in stopped), default=0)
    events = [
        event
        for pid, one in enumerate(stopped, start=1)
        for event in leg_events(
            one.legs, pid=pid, name=f"{one.worker_id} ({one.role.value}) on {one.host}", base_ns=base_ns
        )
    ]
    events += handoff_events([one.legs for one in stopped], base_ns=base_ns)
    whole = {"displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns, "traceEvents": events}
    return msgspec.json.encode(whole)
