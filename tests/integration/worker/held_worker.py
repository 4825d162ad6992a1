"""A simulated worker whose event loop is held for the seconds in a file, once the file is there."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from services.worker.__main__ import late_reports, with_id
from services.worker.service import engine_starter, run_worker
from services.worker.settings import Settings
from shared.runtime.service import Service, run_service
from shared.runtime.settings import load, load_common

LOOK_S = 0.05
COMMON, SETTINGS = load_common(), with_id(load(Settings, "WORKER_"))


async def hold(told: Path) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        if told.exists():
            ends = time.monotonic() + float(told.read_text())
            told.unlink()
            while time.monotonic() < ends:
                pass


async def live(service: Service) -> None:
    service.tasks.create_task(hold(Path(sys.argv[1])))
    late = late_reports(COMMON, SETTINGS.worker_id)
    await run_worker(service, SETTINGS, COMMON, engine_starter("simulated"), late=late)


run_service("worker", SETTINGS.worker_id, COMMON, live)
