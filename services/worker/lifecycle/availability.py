"""An engine that may be away for a while: meanwhile its worker gets no traffic, and says why."""

from __future__ import annotations

import asyncio

from services.worker.engines.port import EngineHealth
from services.worker.lifecycle.status import WorkerStatus


async def follow_health(health: EngineHealth, status: WorkerStatus, note: str) -> None:
    """Until cancelled: PROBING while the engine has a fault, which is added to the ``note``, READY otherwise."""
    changed = asyncio.Event()
    health.on_changed(changed.set)
    shown: str | None = None
    while True:
        changed.clear()
        fault = health.fault
        if fault != shown:
            shown = fault
            await (status.away(f"{note}: {fault}") if fault else status.ready(note))
        await changed.wait()
