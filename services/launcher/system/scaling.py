"""Starts and drains workers for the planner, within --workers-min and --workers-max: which ones, and how."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.markup import escape

from services.launcher.system.devices import Device
from services.launcher.system.options import UpOptions
from services.launcher.system.plan import WorkerPlans, base_environment, devices_by_model, fresh_names
from services.launcher.system.process_plan import Machine, ProcessPlan
from services.launcher.system.screen import Screen
from services.launcher.system.supervisor import Supervisor
from shared.bus.port import BusError, Envelope
from shared.contracts.channels import DRAIN, SCALE, WORKER_RECORDS, Party
from shared.contracts.fleet_orders import DrainWorker
from shared.contracts.ids import WorkerId
from shared.contracts.planning import FleetScaled, ScaleFleet
from shared.contracts.workers import WITHOUT_ENGINE, Role, WorkerRecord

REVISION_CHARS = 12
"""Characters of a revision in a refusal."""


@dataclass(frozen=True, slots=True)
class OwnWorker:
    """A worker of this launcher. ``is_leaving``: it was ordered to drain and no longer counts."""

    worker_id: str
    role: Role
    is_leaving: bool = False
    revision: str = ""
    """Revision of the model; empty until its engine has reported it."""
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What to do; ``refusal`` says why it is less than requested."""

    start: int = 0
    stop: Sequence[str] = ()
    refusal: str = ""


def own_worker(worker_id: str, role_at_start: Role, record: WorkerRecord | None, *, is_leaving: bool) -> OwnWorker:
    """With its present role; before it registers, with the role that it was started for."""
    if record is None:
        return OwnWorker(worker_id, role_at_start, is_leaving)
    revision = "" if record.phase in WITHOUT_ENGINE else record.fingerprint.revision
    return OwnWorker(worker_id, record.role, is_leaving, revision, record.epoch)


def steps_for(request: ScaleFleet, own: Sequence[OwnWorker], *, workers_min: int, workers_max: int) -> Steps:
    """``own`` in start order; the newest workers drain first."""
    staying = [each for each in own if not each.is_leaving]
    if request.change >= 0:
        if refusal := _other_revision(request, own):
            return Steps(refusal=refusal)
        start = max(0, min(request.change, workers_max - len(staying)))
        short = f"{len(staying)} workers run, --workers-max is {workers_max}"
        return Steps(start=start, refusal=short if start < request.change else "")
    candidates = [each.worker_id for each in reversed(staying) if _matches(each, request)]
    stop = candidates[: max(0, min(-request.change, len(staying) - workers_min))]
    if len(stop) == -request.change:
        return Steps(stop=stop)
    if len(candidates) < -request.change:
        of_revision = f" of revision {_short(request.revision)}" if request.revision else ""
        return Steps(stop=stop, refusal=f"{len(candidates)} {request.role} workers{of_revision} run here")
    return Steps(stop=stop, refusal=f"{len(staying)} workers run, --workers-min is {workers_min}")


def _other_revision(request: ScaleFleet, own: Sequence[OwnWorker]) -> str:
    """Why a new worker would not have the requested revision; empty if it would. All workers get the same settings,
    so a new one has the revision of the newest.
    """
    known = [each for each in own if each.revision]
    if not request.revision:
        return ""
    if not known:
        return f"no worker here has reported its revision yet, {_short(request.revision)} was requested"
    newest = max(known, key=lambda each: each.epoch).revision
    if newest == request.revision:
        return ""
    return f"new workers here have revision {_short(newest)}, not {_short(request.revision)}"


def _matches(one: OwnWorker, request: ScaleFleet) -> bool:
    return one.role is request.role and request.revision in ("", one.revision)


def _short(revision: str) -> str:
    return revision[:REVISION_CHARS]


ACCEPT_S_MAX = 5.0
"""Longest wait until a worker accepts the order to drain."""


class Scaler:
    """Handles the planner's scale requests, one at a time."""

    def __init__(self, system: Supervisor, options: UpOptions, machine: Machine, screen: Screen) -> None:
        self._system = system
        self._options = options
        self._machine = machine
        self._screen = screen
        self._lock = asyncio.Lock()
        self._leaving: set[str] = set()
        self._devices, _notes = devices_by_model(options, machine, 0)
        self._device_of: dict[str, int] = {}
        """Index of each worker's device among those of its model."""
        for index in range(len(options.models)):
            self._device_of |= {each.name: place for place, each in enumerate(self._engines_of(index))}

    async def listen(self) -> None:
        """Accept scale requests from now on."""
        await self._system.bus.answer(SCALE, self._on_scale)

    @property
    def _engines(self) -> list[ProcessPlan]:
        """The workers that it scales; stores are excluded."""
        return [each for each in self._system.workers if _role_at_start(each) is not Role.STORE]

    async def _on_scale(self, request: ScaleFleet, _envelope: Envelope) -> FleetScaled:
        async with self._lock:
            try:
                return await self._scale(request)
            except BusError as error:
                return FleetScaled(refusal=f"the launcher cannot read the registry: {error}")

    def _engines_of(self, model: int) -> list[ProcessPlan]:
        return [each for each in self._engines if each.model == model]

    async def _scale(self, request: ScaleFleet) -> FleetScaled:
        records = await self._records()
        served = {
            name: each.model for each in self._engines if each.name in records for name in records[each.name].models
        }
        if request.model not in served:
            return FleetScaled(refusal=f"this launcher runs {', '.join(sorted(served)) or 'no model'}")
        model = served[request.model]
        limits = self._options.models[model]
        if not limits.workers_max:
            return FleetScaled(refusal=f"{request.model} was started without --workers-max")
        own = self._own(model, records)
        steps = steps_for(request, own, workers_min=limits.workers_min, workers_max=limits.workers_max)
        if steps.start:
            self._start(model, request, steps.start, records)
            return FleetScaled(change=steps.start, refusal=steps.refusal)
        gone, refusal = 0, steps.refusal
        for worker_id in steps.stop:
            if refused := await self._drain(worker_id, request.why):
                refusal = refused
            else:
                gone += 1
        return FleetScaled(change=-gone, refusal=refusal)

    async def _records(self) -> dict[str, WorkerRecord]:
        entries = await (await self._system.bus.key_value_store(WORKER_RECORDS)).all()
        return {each.key: each.value for each in entries if each.value is not None}

    def _own(self, model: int, records: Mapping[str, WorkerRecord]) -> list[OwnWorker]:
        self._leaving &= {each.name for each in self._engines}
        return [
            own_worker(each.name, _role_at_start(each), records.get(each.name), is_leaving=each.name in self._leaving)
            for each in self._engines_of(model)
        ]

    def _start(self, model: int, request: ScaleFleet, count: int, records: Mapping[str, WorkerRecord]) -> None:
        running = [each.name for each in self._engines]
        base = base_environment(self._options, self._system.plan.nats_url, Party.WORKER)
        workers = WorkerPlans(self._options, self._machine, base)
        for name in fresh_names([request.role.value] * count, [*records, *running]):
            self._system.add(workers.plan(model, request.role, name, self._free_device(model, name)))
            self._screen.show(f"[cyan]●[/] Starting {name}: {escape(request.why)}.")

    def _free_device(self, model: int, name: str) -> Device:
        """A free device; the least used one while a draining worker still has its own."""
        running = [each.name for each in self._engines_of(model)]
        taken = [index for each, index in self._device_of.items() if each in running]
        index = min(range(len(self._devices[model])), key=taken.count)
        self._device_of[name] = index
        return self._devices[model][index]

    async def _drain(self, worker_id: str, why: str) -> str:
        """Returns why the worker does not drain; empty if it does."""
        order = DrainWorker(worker_id=WorkerId(worker_id))
        try:
            accepted = await self._system.bus.ask(DRAIN, order, timeout_s=ACCEPT_S_MAX)
        except BusError as error:
            return f"{worker_id} did not accept the order to drain: {error or type(error).__name__}"
        if accepted.refusal:
            return f"{worker_id} refused to drain: {accepted.refusal}"
        self._leaving.add(worker_id)
        self._screen.show(f"[yellow]●[/] Draining {worker_id}: {escape(why)}.")
        return ""


def _role_at_start(process: ProcessPlan) -> Role:
    return Role(process.env["WORKER_ROLE"])
