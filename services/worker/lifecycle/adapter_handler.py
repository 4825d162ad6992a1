"""Loads and unloads LoRA adapters as the orchestrator orders it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from services.worker.engines.adapters import AdapterRefused, folder_within
from services.worker.engines.port import EngineAdapters, EngineDead
from services.worker.lifecycle.status import WorkerStatus
from shared.bus.port import Bus, Envelope
from shared.contracts.adapters import AdapterAction, AdapterChanged, ChangeAdapter
from shared.contracts.channels import CHANGE_ADAPTER
from shared.contracts.workers import WorkerPhase
from shared.runtime.clock import Clock

log = logging.getLogger("baton.worker")

UNLOAD_NOTICE_S = 0.5
"""For routers to learn that an adapter goes, before the engine refuses requests for it."""
NO_LORA = "its engine was started without LoRA: set WORKER_LORA_DIR, or --enable-lora in WORKER_ENGINE_ARGS"


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
        """Take orders from now on."""
        await self._bus.answer(CHANGE_ADAPTER, self._change, worker_id=self._status.record.worker_id)

    async def _change(self, order: ChangeAdapter, _envelope: Envelope) -> AdapterChanged:
        """Handler of CHANGE_ADAPTER."""
        began, digest, failure = self._clock.now(), "", ""
        try:
            if self._status.phase is not WorkerPhase.READY:
                raise AdapterRefused(f"it is {self._status.phase.value}")
            if self._adapters is None:
                raise AdapterRefused(NO_LORA)
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
