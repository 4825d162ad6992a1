"""A service whose event loop stands still: while it loads, or for ever once a file is there."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from pathlib import Path

from shared.contracts.control import ServicePhase
from shared.runtime.service import Service, run_service
from shared.runtime.settings import load_common

LOOK_S = 0.05


async def main(service: Service) -> None:
    loads_s, still_if = float(sys.argv[2]), Path(sys.argv[3])
    time.sleep(loads_s)
    service.set_phase(ServicePhase.READY)
    await asyncio.sleep(LOOK_S)
    service.set_phase(ServicePhase.STARTING, "waking up")
    time.sleep(loads_s)
    service.set_phase(ServicePhase.READY, "awake")
    while not service.stopping.is_set():
        await asyncio.sleep(LOOK_S)
        if still_if.exists():
            still_if.unlink()
            re.match("(a+)+$", "a" * 60 + "b")  # Holds the GIL for years.


run_service("worker", sys.argv[1], load_common(), main)
