"""Copies a store's blocks between memory and files, one job at a time, on a separate thread."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from services.worker.engines.store.kv_exchange import StoreExchange
from services.worker.engines.store.memory import Storage
from services.worker.engines.store.tiers import Job

log = logging.getLogger("baton.worker")


class FileJobs:
    """Runs the jobs of ``core``. Calls ``wake`` after each job, and ``fail`` with a reason when the files fail."""

    def __init__(
        self,
        core: StoreExchange,
        storage: Storage,
        *,
        wake: Callable[[], None],
        fail: Callable[[str], None],
    ) -> None:
        self._core = core
        self._storage = storage
        self._wake_loop = wake
        self._fail = fail
        self._under_way: asyncio.Future[list[bytes]] | None = None
        self._broken = False

    def begin(self) -> bool:
        """Start the next job if none is running; returns whether one is running now."""
        if self._under_way is not None and not self._under_way.done():
            return True
        files = None if self._broken else self._storage.files
        job = None if files is None else self._core.next_job()
        if files is None or job is None:
            return False
        loop = asyncio.get_running_loop()
        self._under_way = loop.run_in_executor(self._storage.thread, files.perform, job)
        self._under_way.add_done_callback(lambda done: self._ended(job, done))
        return True

    async def finish(self) -> None:
        """Run jobs until none is left."""
        while self.begin() and self._under_way is not None:
            await asyncio.wait([self._under_way])

    async def close(self) -> None:
        """Close the files and end the thread."""
        if self._storage.files is not None:
            self._storage.thread.submit(self._storage.files.close, self._core.tiers.files.records())
        await asyncio.to_thread(self._storage.thread.shutdown)

    def disk_free_bytes(self) -> int:
        """Free space of the file system, without root's reserve; -1 if there are no files or it is unknown."""
        if self._storage.files is None:
            return -1
        try:
            stat = os.statvfs(self._storage.files.folder)
        except OSError:
            return -1
        return stat.f_bavail * stat.f_frsize

    def _ended(self, job: Job, done: asyncio.Future[list[bytes]]) -> None:
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            self._broken = True
            self._fail(f"the store's files cannot be used any more: {error!r}")
            return
        known = self._core.tiers.counts.damaged
        self._core.ended(job, done.result())
        if damaged := self._core.tiers.counts.damaged - known:
            log.warning("%d blocks in files failed their checksums and were dropped", damaged)
        self._wake_loop()
