"""The thread beside the model: owns the agent, so that neither connecting nor reading takes the model's time.

A read over shared memory is copied by whoever begins it, for milliseconds; the model thread must not be that one, and
should not have to share its core with that one. With nothing to do the thread sleeps on a condition.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from connector.orders import Orders, Results
from connector.transfer.cpu_affinity import allow_cores
from connector.worker.copier import Copier

POLL_S = 0.000_1
"""Between looks at what is under way."""
REPORT_S_MAX = 0.005
"""Between reports while one read follows another. Whoever waits for a report wakes for each, on the core that copies,
and has no use for a part of a read.
"""
CLOSE_S_MAX = 5.0
ORDERS_WAITING_MAX = 4096
"""Steps' worth of orders that the thread may be behind; the model thread waits rather than lose one."""
BEHIND_S_MAX = 5.0
"""For the thread to take some on. An engine that cannot move KV any more must not seem to live."""


class TransferThread:
    """Hands orders to a Copier on its own thread, and results back."""

    def __init__(self, make_copier: Callable[[], Copier], cores: Sequence[int] = ()) -> None:
        self._make_copier = make_copier
        self._cores = cores
        self._wake = threading.Condition()
        self._orders: deque[Orders] = deque()
        self._results = Results()
        self._reported_at = 0.0
        self.ring: Callable[[], None] = lambda: None
        """Called by the thread after each report."""
        self._closing = False
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kv-transfers", daemon=True)
        self._thread.start()

    def submit(self, orders: Orders) -> None:
        """Take orders on; answers at once."""
        if not orders:
            return
        with self._wake:
            is_room = self._wake.wait_for(lambda: len(self._orders) < ORDERS_WAITING_MAX or self._broken, BEHIND_S_MAX)
            self._raise_if_broken()
            if not is_room:
                raise RuntimeError(f"the transfer thread takes no orders for {BEHIND_S_MAX} s")
            self._orders.append(orders)
            self._wake.notify_all()

    def take_results(self, wait_s: float = 0.0) -> Results:
        """What became final since the last call; if nothing did, wait for it so long."""
        with self._wake:
            if wait_s:
                self._wake.wait_for(lambda: self._results or self._broken is not None, wait_s)
            self._raise_if_broken()
            results, self._results = self._results, Results()
            return results

    def close(self) -> None:
        """Cut what is under way and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(CLOSE_S_MAX)

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise RuntimeError("the transfer thread broke") from self._broken

    def _run(self) -> None:
        try:
            allow_cores(self._cores)
            copier = self._make_copier()
            while not self._closing:
                self._turn(copier)
            copier.close()
        except BaseException as bug:
            with self._wake:
                self._broken = bug
                self._wake.notify_all()

    def _turn(self, copier: Copier) -> None:
        with self._wake:
            if not copier.busy:
                self._wake.wait_for(lambda: self._orders or self._closing)
            orders = list(self._orders)
            self._orders.clear()
            if orders:
                self._wake.notify_all()
        for one in orders:
            copier.submit(one)
        goes_on = copier.advance() and copier.busy
        is_due = copier.has_ended_a_read and time.monotonic() > self._reported_at + REPORT_S_MAX
        if not goes_on or is_due:
            self._report(copier.take_results())
        if copier.busy and not goes_on:
            time.sleep(POLL_S)

    def _report(self, results: Results) -> None:
        self._reported_at = time.monotonic()
        if results:
            with self._wake:
                self._results.connected.extend(results.connected)
                self._results.parts.extend(results.parts)
                self._wake.notify_all()
            self.ring()
