"""The state folder: the space that is free in it, and the files that outlive a worker's process.

One of these says why its engine was refused at start: the worker removes it at its next successful start, and `baton
doctor` reads it when the process has ended. Another has the role that a worker changed to at run time: a restarted
worker reads it, and the launcher removes it before it starts a new worker. The third has the peers that a worker's
engine was connecting to when it died.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import msgspec

from shared.contracts.control import DiskFolder, DiskSpace, ServiceStatus

log = logging.getLogger("baton.worker")

FOLDER = "refused"


def save_refusal(state_dir: str, worker_id: str, reason: str) -> None:
    """A folder that is not writable costs the finding of `baton doctor`; the log has the reason too."""
    file = _folder(state_dir) / worker_id
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(reason, encoding="utf-8")
    except OSError as error:
        log.warning("the refusal cannot be saved: %s", error)


def forget_refusal(state_dir: str, worker_id: str) -> None:
    """The worker's engine has started."""
    try:
        (_folder(state_dir) / worker_id).unlink(missing_ok=True)
    except OSError as error:
        log.warning("an earlier refusal cannot be removed: %s", error)


def refusals(state_dir: str) -> dict[str, tuple[str, float]]:
    """Refusals by worker id: the reason and when, in seconds since 1970. Raises OSError for a folder that cannot be
    read.
    """
    folder = _folder(state_dir)
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return {file.name: (file.read_text(encoding="utf-8", errors="replace"), file.stat().st_mtime) for file in files}


def _folder(state_dir: str) -> Path:
    return Path(state_dir).expanduser() / FOLDER


def saved_role_file(state_dir: str, worker_id: str) -> Path:
    """It exists only while the role differs from the role in the settings."""
    return Path(state_dir).expanduser() / "roles" / f"{worker_id}.json"


def suspects_file(state_dir: str, worker_id: str) -> Path:
    """It exists once an engine of the worker has died while it connected to a peer."""
    return Path(state_dir).expanduser() / "suspects" / f"{worker_id}.json"


MEASURE_S = 15.0
FOLDERS = {DiskFolder.STATE: "", DiskFolder.LOGS: "logs", DiskFolder.NATS: "nats", DiskFolder.KV_STORE: "kv-store"}
"""Inside the state directory; each may be on a file system of its own."""


class DiskWatch:
    """Measures every ``MEASURE_S`` in a thread: a network file system that does not respond delays nothing else."""

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
            self.spaces = measure_disks(self._state_dir)
            time.sleep(MEASURE_S)


def measure_disks(state_dir: Path) -> list[DiskSpace]:
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
