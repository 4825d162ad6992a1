"""What a worker is told to do with itself: leave, or take on another role."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from services.worker.legs.server import LegServer
from services.worker.lifecycle.drain import DrainPlan, ordered
from services.worker.lifecycle.probing import Prober, failed
from services.worker.lifecycle.role import refusal
from services.worker.lifecycle.self_test import NEW_TO, as_text
from services.worker.lifecycle.status import WorkerStatus
from shared.bus.port import Envelope
from shared.contracts.channels import CHANGE_ROLE, DRAIN
from shared.contracts.fleet_orders import ChangeRole, DrainWorker, OrderTaken, RoleChanged
from shared.contracts.workers import Role
from shared.runtime.service import Service

log = logging.getLogger("baton.worker")


class OrderHandler:
    """Answers DRAIN and CHANGE_ROLE."""

    def __init__(
        self,
        service: Service,
        server: LegServer,
        prober: Prober | None,
        standing: WorkerStatus,
        drain_s_max: float,
    ) -> None:
        """``prober`` is None where nothing can be verified."""
        self._service = service
        self._server = server
        self._prober = prober
        self._status = standing
        self._drain_s_max = drain_s_max
        self._order: asyncio.Future[DrainPlan] = asyncio.get_running_loop().create_future()
        self._is_changing = False

    async def open(self) -> None:
        """Take orders from now on."""
        worker_id = self._status.record.worker_id
        await self._service.bus.answer(DRAIN, self._drain, worker_id=worker_id)
        await self._service.bus.answer(CHANGE_ROLE, self._change_role, worker_id=worker_id)

    async def told_to_leave(self) -> DrainPlan:
        """Wait for an order, or for the process to be told to end."""
        stopping = asyncio.ensure_future(self._service.stopping.wait())
        either: list[asyncio.Future[Any]] = [stopping, self._order]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        return self._order.result() if self._order.done() else DrainPlan(s_max=self._drain_s_max)

    async def _drain(self, order: DrainWorker, _envelope: Envelope) -> OrderTaken:
        """Answerer of DRAIN."""
        record = self._status.record
        taken = OrderTaken(worker_id=record.worker_id, epoch=record.epoch)
        if self._order.done() or self._service.stopping.is_set():
            return OrderTaken(worker_id=record.worker_id, epoch=record.epoch, refusal="it is leaving already")
        log.info("told to leave: legs have %s s", "its usual" if order.deadline_s is None else order.deadline_s)
        self._order.set_result(ordered(order, self._drain_s_max))
        return taken

    async def _change_role(self, order: ChangeRole, _envelope: Envelope) -> RoleChanged:
        """Answerer of CHANGE_ROLE: verified first, then said, so that no request meets a role that does not work."""
        before, legs, began = self._status.record.role, self._server.legs, self._service.clock.now()
        failure = refusal(before, order.role, self._status.phase, is_changing=self._is_changing)
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
        """Answers why it did not happen."""
        before, note = self._status.record.role, ""
        if self._prober is not None:
            found = await self._prober.prove(NEW_TO[role])
            note = as_text(found)
            if failed(found):
                return note
        if late := refusal(before, role, self._status.phase, is_changing=False):
            return late
        await self._status.take_on(role, note)
        log.info("the role is %s now, no longer %s%s", role.value, before.value, f" ({note})" if note else "")
        return ""
