"""The transfer thread: owns the transfer agent, so that connecting and reading take no time of the model's thread.

Over shared memory the thread that begins a read copies it, which takes milliseconds. So the model's thread must not
begin reads, and the transfer thread should not share its core. Without work the thread sleeps on a condition.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from connector.messages import Orders, Results
from connector.transfer.threads import allow_cores
from connector.worker.copier import Copier

POLL_S = 0.000_1
"""Between checks of what is under way."""
REPORT_S_MAX = 0.005
"""Between reports while one read follows another. The scheduler wakes for each report, often on the core that copies,
and can do nothing with a part of a read.
"""
CLOSE_S_MAX = 5.0
ORDERS_WAITING_MAX = 4096
"""Steps whose orders may wait. The model's thread then blocks, because a lost order would leave requests waiting."""
BEHIND_S_MAX = 5.0
"""Maximum duration of that block; then ``submit`` raises and the engine ends. An engine that cannot move KV must not
look healthy.
"""


class TransferThread:
    """Runs a Copier on a thread of its own."""

    def __init__(self, make_copier: Callable[[], Copier], cores: Sequence[int] = ()) -> None:
        self._make_copier = make_copier
        self._cores = cores
        self._wake = threading.Condition()
        self._orders: deque[Orders] = deque()
        self._results = Results()
        self._reported_at = 0.0
        self._wakers: list[Callable[[], None]] = []
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kv-transfers", daemon=True)
        self._thread.start()

    def submit(self, orders: Orders) -> None:
        """Queue orders; returns at once. Raises RuntimeError if the thread has failed or does not take orders."""
        if not orders:
            return
        with self._wake:
            has_slot = self._wake.wait_for(
                lambda: len(self._orders) < ORDERS_WAITING_MAX or self._failure, BEHIND_S_MAX
            )
            self._raise_if_failed()
            if not has_slot:
                raise RuntimeError(f"the transfer thread has taken no orders for {BEHIND_S_MAX} s")
            self._orders.append(orders)
            self._wake.notify_all()

    def wake_on_results(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` on this thread after each report."""
        self._wakers.append(wake)

    def take_results(self, wait_s: float = 0.0) -> Results:
        """Results since the last call. If there are none, wait for at most ``wait_s``."""
        with self._wake:
            if wait_s:
                self._wake.wait_for(lambda: self._results or self._failure is not None, wait_s)
            self._raise_if_failed()
            results, self._results = self._results, Results()
            return results

    def close(self) -> None:
        """Cut what is under way and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(CLOSE_S_MAX)

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the transfer thread failed") from self._failure

    def _run(self) -> None:
        try:
            allow_cores(self._cores)
            copier = self._make_copier()
            while not self._closing:
                self._run_once(copier)
            copier.close()
        except BaseException as bug:
            with self._wake:
                self._failure = bug
                self._wake.notify_all()

    def _run_once(self, copier: Copier) -> None:
        with self._wake:
            if not copier.busy:
                self._wake.wait_for(lambda: self._orders or self._closing)
            orders = list(self._orders)
            self._orders.clear()
            if orders:
                self._wake.notify_all()
        for one in orders:
            copier.submit(one)
        has_progress = copier.advance() and copier.busy
        is_report_due = copier.has_ended_a_read and time.monotonic() > self._reported_at + REPORT_S_MAX
        if not has_progress or is_report_due:
            self._report(copier.take_results())
        if copier.busy and not has_progress:
            time.sleep(POLL_S)

    def _report(self, results: Results) -> None:
        self._reported_at = time.monotonic()
        if results:
            with self._wake:
                self._results.connected.extend(results.connected)
                self._results.parts.extend(results.parts)
                self._wake.notify_all()
            for wake in self._wakers:
                wake()
