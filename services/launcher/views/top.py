"""`baton top`: subscribes to the whole system's reports and draws them. It does not poll."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live

from services.launcher.bus_client import open_bus
from services.launcher.views.top_picture import LISTENED_S, State, frame
from services.launcher.views.watch import Watch
from services.launcher.views.workers import Drawing
from shared.bus.port import Bus, BusError, Envelope
from shared.contracts.channels import (
    DRAINED,
    FLEET_STATE,
    LOAD,
    PLAN,
    REQUESTS_FINISHED,
    SERVICE_STATUS,
    WORKER_LOST,
    WORKER_RECORDS,
)
from shared.contracts.ids import WorkerId
from shared.runtime.clock import Clock, SystemClock
from shared.runtime.waiting import first_of

M = TypeVar("M", bound=msgspec.Struct)

DRAWN_S_MIN = 0.2
"""Shortest time between two frames."""
DRAWN_S_MAX = 1.0
"""Longest time between two frames: ages grow without any message."""
REGISTRY_RETRY_S = 1.0
KEY_BYTES_MAX = 64
UP, DOWN = ("k", "\x1b[A", "\x1bOA"), ("j", "\x1b[B", "\x1bOB")
QUIT = ("q", "Q", "\x1b", "\x03", "\x04", "")
"""Keys as a terminal sends them; an empty read means that the terminal was closed."""
LINES_OF_FILES = 40
"""Lines of a frame that goes to a file, plus one for each worker."""


async def run_top(nats_url: str, console: Console, *, once: bool) -> None:
    """Runs until the user quits; without a terminal, prints one frame. Raises BusError."""
    async with open_bus(nats_url) as bus, asyncio.TaskGroup() as tasks:
        top = Top(bus, SystemClock(), console)
        await top.listen()
        following = tasks.create_task(top.follow_registry(), name="follow-registry")
        if once or not console.is_terminal:
            await asyncio.sleep(LISTENED_S)
            lines = LINES_OF_FILES + len(top.watch.workers)
            console.print(
                top.frame(Drawing(console.width, lines, console.options.ascii_only, fills=False)), highlight=False
            )
        else:
            await top.show()
        following.cancel()


class Top:
    """Subscriptions, keys and screen of one `baton top`."""

    def __init__(self, bus: Bus, clock: Clock, console: Console) -> None:
        self._bus = bus
        self._clock = clock
        self._console = console
        self.watch = Watch(clock.now())
        self._first_worker = 0
        self._changed = asyncio.Event()
        self._quit = asyncio.Event()

    async def listen(self) -> None:
        """Subscribe to everything."""
        watch, bus = self.watch, self._bus
        await bus.subscribe(LOAD, self._handler(watch.load_reported))
        await bus.subscribe(FLEET_STATE, self._handler(watch.fleet_state))
        await bus.subscribe(WORKER_LOST, self._handler(watch.worker_lost))
        await bus.subscribe(DRAINED, self._handler(watch.worker_drained))
        await bus.subscribe(PLAN, self._handler(watch.planned))
        await bus.subscribe(SERVICE_STATUS, self._handler(watch.service_status))
        await bus.subscribe(
            REQUESTS_FINISHED, self._handler(lambda message, now: watch.finished(message.requests, now))
        )

    async def follow_registry(self) -> None:
        """Watch the workers' records; never returns."""
        while True:
            with contextlib.suppress(BusError):
                store = await self._bus.key_value_store(WORKER_RECORDS)
                async for entry in store.watch():
                    if entry is None:
                        continue
                    if entry.value is None:
                        self.watch.record_removed(WorkerId(entry.key), self._clock.now())
                    else:
                        self.watch.record(entry.value, self._clock.now())
                    self._changed.set()
            await asyncio.sleep(REGISTRY_RETRY_S)

    async def show(self) -> None:
        """Draw after changes, until a key or a signal ends it."""
        loop, console = asyncio.get_running_loop(), self._console
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._quit.set)
        loop.add_signal_handler(signal.SIGWINCH, self._changed.set)
        with _keys(self._pressed), Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
            while not self._quit.is_set():
                self._changed.clear()
                drawing = Drawing(console.width, console.height, letters=console.options.ascii_only)
                live.update(self.frame(drawing), refresh=True)
                await first_of(asyncio.sleep(DRAWN_S_MIN), self._quit.wait())
                await first_of(self._changed.wait(), self._quit.wait(), within_s=DRAWN_S_MAX - DRAWN_S_MIN)

    def frame(self, drawing: Drawing) -> RenderableType:
        """The present frame."""
        now = self._clock.now()
        self.watch.tick(now)
        self._first_worker = min(self._first_worker, max(0, len(self.watch.workers) - 1))
        clock = time.strftime("%H:%M:%S", time.localtime(self._clock.wall_ms() / 1000))
        state = State(now=now, clock=clock, connected=self._bus.connected, first_worker=self._first_worker)
        return frame(self.watch, state, drawing)

    def _handler(self, take: Callable[[M, float], None]) -> Callable[[M, Envelope], None]:
        def handle(message: M, _envelope: Envelope) -> None:
            take(message, self._clock.now())
            self._changed.set()

        return handle

    def _pressed(self, key: str) -> None:
        if key in QUIT:
            self._quit.set()
        elif key in DOWN:
            self._first_worker += 1
        elif key in UP:
            self._first_worker = max(0, self._first_worker - 1)
        self._changed.set()


@contextlib.contextmanager
def _keys(pressed: Callable[[str], None]) -> Iterator[None]:
    """Call ``pressed`` for each key at once; restores the terminal at the end."""
    if not sys.stdin.isatty():
        yield
        return
    loop, terminal = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    loop.add_reader(terminal, lambda: pressed(os.read(terminal, KEY_BYTES_MAX).decode(errors="replace")))
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
