"""What a process uses of its machine: memory, CPU, file descriptors, and how late its event loop is."""

from __future__ import annotations

import asyncio
import resource
import threading
import time

import msgspec
import psutil

from shared.contracts.control import ProcessUse, ServiceStatus

MEASURE_S = 5.0
LOOK_S = 0.25
"""Interval at which the event loop is measured: a timer is as late as everything else that waits for the loop."""
LAG_S = 15.0
"""The longest delay is shown for at least so long, so that no scrape misses it."""


class ProcessWatch:
    """Measures in a thread: with many connections, counting descriptors takes milliseconds."""

    def __init__(self) -> None:
        self._use = ProcessUse()
        self._lag_s = self._lag_before_s = 0.0
        threading.Thread(target=self._follow, name="measure-process", daemon=True).start()

    def add_to(self, status: ServiceStatus) -> ServiceStatus:
        """The status with the last measurement."""
        use = msgspec.structs.replace(self._use, loop_lag_s=max(self._lag_s, self._lag_before_s))
        return msgspec.structs.replace(status, process=use)

    async def follow_loop(self) -> None:
        """Measure the event loop until cancelled."""
        now = asyncio.get_running_loop().time
        next_at = now() + LAG_S
        while True:
            due = now() + LOOK_S
            await asyncio.sleep(LOOK_S)
            at = now()
            self._lag_s = max(self._lag_s, at - due)
            if at >= next_at:
                self._lag_before_s, self._lag_s, next_at = self._lag_s, 0.0, at + LAG_S

    def _follow(self) -> None:
        while True:
            self._use = measure_process(self._use)
            time.sleep(MEASURE_S)


def measure_process(before: ProcessUse) -> ProcessUse:
    """The use of the process now. ``before`` is what stays where it cannot be read, because no descriptor is left."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files_max = 0 if soft == resource.RLIM_INFINITY else soft
    times = resource.getrusage(resource.RUSAGE_SELF)
    rss_bytes, open_files = before.rss_bytes, files_max
    try:
        process = psutil.Process()
        rss_bytes, open_files = process.memory_info().rss, process.num_fds()
    except (OSError, psutil.Error):
        pass
    return ProcessUse(
        rss_bytes=rss_bytes, cpu_s=times.ru_utime + times.ru_stime, open_files=open_files, open_files_max=files_max
    )
