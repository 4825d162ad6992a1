"""Orders to a worker: drain, sleep, change its role, load or unload a LoRA adapter."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from services.worker.engines.adapters import AdapterRefused, folder_within
from services.worker.engines.port import EngineAdapters, EngineDead
from services.worker.legs.server import LegServer
from services.worker.lifecycle.drain import DrainPlan, plan_of
from services.worker.lifecycle.probing import Prober, failed
from services.worker.lifecycle.rank_group import RankGroup
from services.worker.lifecycle.registration import WorkerStatus, refusal
from services.worker.lifecycle.self_test import NEW_PARTNERS, as_text
from shared.bus.port import Bus, Envelope
from shared.contracts.channels import CHANGE_ADAPTER, CHANGE_ROLE, DRAIN, SLEEP
from shared.contracts.fleet_orders import (
    AdapterAction,
    AdapterChanged,
    ChangeAdapter,
    ChangeRole,
    DrainWorker,
    OrderTaken,
    RoleChanged,
    SleepWorker,
)
from shared.contracts.workers import Role, WorkerPhase
from shared.runtime.clock import Clock
from shared.runtime.service import Service

log = logging.getLogger("baton.worker")


UNLOAD_NOTICE_S = 0.5
"""Time for routers to learn that an adapter goes, before the engine refuses requests for it."""
TAKES_NO_ADAPTERS = "its engine was started without LoRA: set WORKER_LORA_DIR, or --enable-lora in WORKER_ENGINE_ARGS"


class OrderHandler:
    def __init__(
        self,
        service: Service,
        server: LegServer,
        prober: Prober | None,
        status: WorkerStatus,
        drain_s_max: float,
        group: RankGroup | None = None,
    ) -> None:
        """``prober`` is None for a worker that cannot test its KV exchange, ``group`` for one without data parallel."""
        self._group = group
        self._service = service
        self._server = server
        self._prober = prober
        self._status = status
        self._drain_s_max = drain_s_max
        self._order: asyncio.Future[DrainPlan] = asyncio.get_running_loop().create_future()
        self._is_changing = False

    async def open(self) -> None:
        worker_id = self._status.record.worker_id
        await self._service.bus.answer(DRAIN, self._drain, worker_id=worker_id)
        await self._service.bus.answer(SLEEP, self._sleep, worker_id=worker_id)
        await self._service.bus.answer(CHANGE_ROLE, self._change_role, worker_id=worker_id)

    async def wait_for_drain(self) -> DrainPlan:
        """Wait for an order to drain, for SIGTERM, or for the drain of another worker of the group."""
        stopping = asyncio.ensure_future(self._service.stopping.wait())
        either: list[asyncio.Future[Any]] = [stopping, self._order]
        if self._group is not None:
            either.append(self._group.drain_wanted)
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if self._group is not None and self._group.drain_wanted.done() and not self._order.done():
            return self._group.drain_wanted.result()
        return self._order.result() if self._order.done() else DrainPlan(s_max=self._drain_s_max)

    async def _drain(self, order: DrainWorker, _envelope: Envelope) -> OrderTaken:
        if self._order.done() or self._service.stopping.is_set():
            return self._taken("it drains already")
        plan = plan_of(order, self._drain_s_max)
        log.info("ordered to drain: running legs have %g s", plan.s_max)
        self._order.set_result(plan)
        return self._taken()

    async def _sleep(self, _order: SleepWorker, _envelope: Envelope) -> OrderTaken:
        if refusal := self._why_not_sleep():
            return self._taken(refusal)
        log.info("ordered to sleep: running legs have %g s", self._drain_s_max)
        self._order.set_result(DrainPlan(s_max=self._drain_s_max, sleeps=True))
        return self._taken()

    def _taken(self, refusal: str = "") -> OrderTaken:
        record = self._status.record
        return OrderTaken(worker_id=record.worker_id, epoch=record.epoch, refusal=refusal)

    def _why_not_sleep(self) -> str:
        if self._order.done() or self._service.stopping.is_set():
            return "it drains already"
        if self._status.record.role is Role.STORE:
            return "a store has no engine"
        if self._group is not None:
            return "it is a rank of a data parallel group, which does not sleep"
        return "" if self._status.phase is WorkerPhase.READY else f"it is {self._status.phase.value}"

    async def _change_role(self, order: ChangeRole, _envelope: Envelope) -> RoleChanged:
        """Handler of CHANGE_ROLE. The KV self-test for the new role runs before the registry shows the role, so that no
        request meets a role that does not work.
        """
        before, legs, began = self._status.record.role, self._server.legs, self._service.clock.now()
        is_attached = self._status.record.attached
        failure = refusal(before, order.role, self._status.phase, is_changing=self._is_changing, attached=is_attached)
        if not failure and order.role is not before:
            self._is_changing = True
            try:
                failure = await self._change(order.role)
            finally:
                self._is_changing = False
        record = self._status.record
        return RoleChanged(
            worker_id=record.worker_id,
            epoch=record.epoch,
            before=before,
            role=record.role,
            seconds=self._service.clock.now() - began,
            legs=legs,
            failure=failure,
        )

    async def _change(self, role: Role) -> str:
        """Returns why the role was not changed; empty if it was."""
        before, note = self._status.record.role, ""
        if self._prober is not None:
            results = await self._prober.test(NEW_PARTNERS[role])
            note = as_text(results)
            if failed(results):
                return note
        if late := refusal(before, role, self._status.phase, is_changing=False):
            return late
        await self._status.change_role(role, note)
        log.info("the role is %s now, no longer %s%s", role.value, before.value, f" ({note})" if note else "")
        return ""


class AdapterHandler:
    """Answers CHANGE_ADAPTER. Paths are taken relative to ``lora_dir``, and nothing outside of it is read."""

    def __init__(
        self, bus: Bus, clock: Clock, status: WorkerStatus, adapters: EngineAdapters | None, lora_dir: str
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._status = status
        self._adapters = adapters
        self._lora_dir = lora_dir

    async def open(self) -> None:
        await self._bus.answer(CHANGE_ADAPTER, self._change, worker_id=self._status.record.worker_id)

    async def _change(self, order: ChangeAdapter, _envelope: Envelope) -> AdapterChanged:
        began, digest, failure = self._clock.now(), "", ""
        try:
            if self._status.phase is not WorkerPhase.READY:
                raise AdapterRefused(f"it is {self._status.phase.value}")
            if self._adapters is None:
                raise AdapterRefused(TAKES_NO_ADAPTERS)
            if order.action is AdapterAction.LOAD:
                digest = await self._load(self._adapters, order)
            else:
                await self._unload(self._adapters, order.name)
        except (AdapterRefused, EngineDead) as error:
            failure = str(error)
        log.info("ordered to %s the adapter %r: %s", order.action.value, order.name, failure or digest or "done")
        record = self._status.record
        return AdapterChanged(
            worker_id=record.worker_id,
            epoch=record.epoch,
            digest=digest,
            seconds=self._clock.now() - began,
            failure=failure,
        )

    async def _load(self, adapters: EngineAdapters, order: ChangeAdapter) -> str:
        """Returns the digest of the files."""
        folder = await asyncio.to_thread(folder_within, self._lora_dir, order.path)
        adapter = await adapters.load(order.name, folder, Path(self._lora_dir))
        await self._status.adapters_changed()
        return adapter.digest

    async def _unload(self, adapters: EngineAdapters, name: str) -> None:
        if all(one.name != name for one in adapters.loaded):
            raise AdapterRefused(f"{name!r} is not loaded")
        await self._status.adapters_changed(leaving=name)
        await asyncio.sleep(UNLOAD_NOTICE_S)
        await adapters.unload(name)
        await self._status.adapters_changed()
