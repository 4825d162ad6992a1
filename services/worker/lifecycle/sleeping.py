"""A worker that sleeps: it is registered and has no engine. It starts one when the orchestrator wakes it.

Falling asleep replaces the process by a new one with the same id (``begin_anew``): only then nothing of the engine is
left, neither memory nor registrations of memory with NIXL. vLLM's own sleep levels keep the process, but unmap KV
memory that NIXL has registered, and do nothing on a CPU (DECISIONS 43).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from services.worker.lifecycle.registration import Registration
from shared.bus.port import BusError, Envelope
from shared.contracts.channels import CHANGE_ROLE, DRAIN, DRAINED, SLEEP, WAKE
from shared.contracts.control import ServicePhase
from shared.contracts.fleet_orders import (
    ChangeRole,
    DrainWorker,
    OrderTaken,
    RoleChanged,
    SleepWorker,
    WakeWorker,
    WorkerDrained,
)
from shared.contracts.workers import WorkerPhase
from shared.runtime.service import Service

log = logging.getLogger("baton.worker")

ASLEEP = "asleep"
"""Detail of the service status."""
FLUSH_S_MAX = 2.0


class Sleep:
    def __init__(self, service: Service, registration: Registration) -> None:
        self._service = service
        self._registration = registration
        self._ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether the worker shall start an engine; otherwise it leaves."""

    async def until_woken(self) -> bool:
        """Returns whether to start the engine; False when the worker is to end."""
        service, worker_id = self._service, self._registration.record.worker_id
        subscriptions = [
            await service.bus.answer(WAKE, self._wake, worker_id=worker_id),
            await service.bus.answer(SLEEP, self._sleep, worker_id=worker_id),
            await service.bus.answer(DRAIN, self._drain, worker_id=worker_id),
            await service.bus.answer(CHANGE_ROLE, self._change_role, worker_id=worker_id),
        ]
        service.set_phase(ServicePhase.READY, ASLEEP)
        stopping = asyncio.ensure_future(service.stopping.wait())
        try:
            either: list[asyncio.Future[Any]] = [self._ended, stopping]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            for each in subscriptions:
                await each.close()
        is_woken = self._ended.done() and self._ended.result() and not service.stopping.is_set()
        if is_woken:
            service.set_phase(ServicePhase.STARTING, "waking up")
            record = msgspec.structs.replace(self._registration.record, phase=WorkerPhase.STARTING)
            await self._registration.update(record)
        elif self._ended.done():
            await self._report_drain()
        return is_woken

    async def _wake(self, _order: WakeWorker, _envelope: Envelope) -> OrderTaken:
        return self._taken(wakes=True)

    async def _sleep(self, _order: SleepWorker, _envelope: Envelope) -> OrderTaken:
        return OrderTaken(worker_id=self._registration.record.worker_id, epoch=self._registration.record.epoch)

    async def _drain(self, _order: DrainWorker, _envelope: Envelope) -> OrderTaken:
        return self._taken(wakes=False)

    async def _change_role(self, _order: ChangeRole, _envelope: Envelope) -> RoleChanged:
        """A role is verified by a KV self-test, which needs the engine."""
        record = self._registration.record
        return RoleChanged(
            worker_id=record.worker_id,
            epoch=record.epoch,
            before=record.role,
            role=record.role,
            failure="it is asleep; `baton wake MODEL` wakes it",
        )

    def _taken(self, *, wakes: bool) -> OrderTaken:
        record = self._registration.record
        if not self._ended.done():
            log.info("ordered to %s", "wake up" if wakes else "leave")
            self._ended.set_result(wakes)
        refusal = "" if self._ended.result() is wakes else "it is ending its sleep already"
        return OrderTaken(worker_id=record.worker_id, epoch=record.epoch, refusal=refusal)

    async def _report_drain(self) -> None:
        record = self._registration.record
        report = WorkerDrained(worker_id=record.worker_id, epoch=record.epoch, seconds=0.0, ordered=True)
        try:
            await self._service.bus.publish(DRAINED, report)
            await self._service.bus.flush(FLUSH_S_MAX)
        except BusError as error:
            log.info("the drain's report was not sent: %s", error or "timeout")


def begin_anew(environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by a worker that sleeps. It keeps the process id, which its supervisor knows.

    ``environment``: as this process got it, without what an engine has added.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, *sys.orig_argv[1:]]
    os.execve(  # noqa: S606  # no shell is wanted
        sys.executable, command, {**environment, "WORKER_ASLEEP": "true"}
    )
