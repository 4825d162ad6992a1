"""Free space of the file systems that a process and its neighbours write to."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import msgspec

from shared.contracts.control import DiskFolder, DiskSpace, ServiceStatus

MEASURE_S = 15.0
FOLDERS = {DiskFolder.STATE: "", DiskFolder.LOGS: "logs", DiskFolder.NATS: "nats", DiskFolder.KV_STORE: "kv-store"}
"""Inside the state directory; each may be on a file system of its own."""


class DiskWatch:
    """Measures every ``MEASURE_S`` in a thread: a network file system that does not respond delays nobody."""

    def __init__(self, state_dir: str) -> None:
        self.spaces: list[DiskSpace] = []
        """The last measurement."""
        self._state_dir = Path(state_dir).expanduser().absolute()
        threading.Thread(target=self._follow, name="measure-disks", daemon=True).start()

    def add_to(self, status: ServiceStatus) -> ServiceStatus:
        """The status with the last measurement."""
        return msgspec.structs.replace(status, disks=self.spaces)

    def _follow(self) -> None:
        while True:
            self.spaces = measure(self._state_dir)
            time.sleep(MEASURE_S)


def measure(state_dir: Path) -> list[DiskSpace]:
    """The space of each file system once, under the first folder on it. A folder that does not exist is its parent."""
    found: dict[int, DiskSpace] = {}
    for folder, name in FOLDERS.items():
        there = state_dir / name
        while not there.exists() and there != there.parent:
            there = there.parent
        try:
            device, usage = there.stat().st_dev, os.statvfs(there)
        except OSError:
            continue
        free, size = usage.f_bavail * usage.f_frsize, usage.f_blocks * usage.f_frsize
        found.setdefault(device, DiskSpace(folder=folder, free_bytes=free, size_bytes=size))
    return list(found.values())
