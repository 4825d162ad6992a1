"""Load reports while the worker's event loop is held: by a request that makes much work at once, or in a call that
takes long. Its own reports do not come then, and routers would give up all requests of a worker that has not died.

A thread, with an event loop and a connection to NATS of its own, repeats the last report and says how late the worker's
loop is. Routers place new requests elsewhere meanwhile. A call that keeps the GIL holds this thread, too.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

import msgspec

from shared.bus.port import Bus, BusError, BusRefused
from shared.contracts.channels import LOAD
from shared.contracts.load import LOAD_PERIOD_S_MAX, LoadReport

log = logging.getLogger("baton.worker")

CHECK_S = 0.5
LATE_S_MIN = 1.5 * LOAD_PERIOD_S_MAX
"""Age of the worker's last report at which this thread repeats it."""
HELD_S_MAX = 60.0
"""A loop that is held for longer may never come back: the worker falls silent, and counts as lost."""
RETRY_S = 1.0


class LateReports:
    """Used as a context while the worker reports. ``sent`` is called in its event loop, the rest runs in the thread."""

    def __init__(self, connect: Callable[[], Awaitable[Bus]], *, held_s_max: float = HELD_S_MAX) -> None:
        """``connect`` opens a connection in the loop that runs it."""
        self._connect = connect
        self._held_s_max = held_s_max
        self._last: tuple[LoadReport, float] | None = None
        self._closed = threading.Event()
        self._is_late = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._follow()), name="late-reports", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The worker reports no more. The thread ends by itself, within a second."""
        self._closed.set()

    def sent(self, report: LoadReport) -> None:
        """The worker's loop sends this report now."""
        self._last = report, time.monotonic()

    def due(self, now: float) -> LoadReport | None:
        """The report to send at ``now``; None if the worker sends its own, or has not for too long."""
        if self._last is None:
            return None
        report, sent_at = self._last
        late_s = now - sent_at
        if not LATE_S_MIN <= late_s <= self._held_s_max:
            return None
        # Without the digest: KV events that came after it may have arrived before.
        return msgspec.structs.replace(report, loop_late_s=late_s, digest=None)

    async def _follow(self) -> None:
        while not self._closed.is_set():
            try:
                bus = await self._connect()
            except BusRefused:  # So is the worker's own connection, whose error ends the process.
                return
            except BusError as error:
                log.debug("the thread for late reports has no connection: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            try:
                await self._report(bus)
            finally:
                await bus.close()

    async def _report(self, bus: Bus) -> None:
        while not (self._closed.is_set() or bus.failed.done()):
            await asyncio.sleep(CHECK_S)
            report = self.due(time.monotonic())
            if report is not None and not self._closed.is_set():
                try:
                    await bus.publish(LOAD, report)
                except BusError as error:
                    log.debug("a late report was not sent: %s", error)
            if report is not None and not self._is_late:
                log.warning("the event loop is held, for %.1f s so far", report.loop_late_s)
            self._is_late = report is not None
        if bus.failed.done():
            log.debug("the thread for late reports connects again: %s", bus.failed.exception())
