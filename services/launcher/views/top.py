"""`baton top`: follows the whole system on the bus, and draws what it hears. Nothing is asked again and again."""

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

from services.launcher.system.waiting import first_of
from services.launcher.views.fleet import open_bus
from services.launcher.views.top_picture import LISTENED_S, State, frame
from services.launcher.views.top_workers import Drawing
from services.launcher.views.watch import Watch
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
from shared.contracts.workers import WORKER_RECORD_TTL_S
from shared.runtime.clock import Clock, SystemClock

M = TypeVar("M", bound=msgspec.Struct)

DRAWN_S_MIN = 0.2
"""Between two frames, however much happens."""
DRAWN_S_MAX = 1.0
"""Ages grow although nothing happens."""
REGISTRY_RETRY_S = 1.0
KEY_BYTES_MAX = 64
UP, DOWN = ("k", "\x1b[A", "\x1bOA"), ("j", "\x1b[B", "\x1bOB")
QUIT = ("q", "Q", "\x1b", "\x03", "\x04", "")
"""Keys as a terminal sends them; nothing at all means that it is gone."""
LINES_OF_FILES = 40
"""And one for each worker."""


async def run_top(nats_url: str, console: Console, *, once: bool) -> None:
    """Until the user has seen enough; on anything but a terminal, one frame. Raises BusError."""
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
    """One watcher: its ears, its keys and its screen."""

    def __init__(self, bus: Bus, clock: Clock, console: Console) -> None:
        self._bus = bus
        self._clock = clock
        self._console = console
        self.watch = Watch(clock.now())
        self._first_worker = 0
        self._changed = asyncio.Event()
        self._over = asyncio.Event()

    async def listen(self) -> None:
        """Hear everything from now on."""
        watch, bus = self.watch, self._bus
        await bus.subscribe(LOAD, self._told(watch.reported))
        await bus.subscribe(FLEET_STATE, self._told(watch.fleet))
        await bus.subscribe(WORKER_LOST, self._told(watch.lost))
        await bus.subscribe(DRAINED, self._told(watch.drained))
        await bus.subscribe(PLAN, self._told(watch.planned))
        await bus.subscribe(SERVICE_STATUS, self._told(watch.service))
        await bus.subscribe(REQUESTS_FINISHED, self._told(lambda told, now: watch.served(told.requests, now)))

    async def follow_registry(self) -> None:
        """Watch the workers' records, for ever."""
        while True:
            with contextlib.suppress(BusError):
                kept = await self._bus.key_value_store(WORKER_RECORDS, ttl_s=WORKER_RECORD_TTL_S)
                async for entry in kept.watch():
                    if entry is None:
                        continue
                    if entry.value is None:
                        self.watch.vanished(WorkerId(entry.key), self._clock.now())
                    else:
                        self.watch.record(entry.value, self._clock.now())
                    self._changed.set()
            await asyncio.sleep(REGISTRY_RETRY_S)

    async def show(self) -> None:
        """Draw whenever something has changed, until a key or a signal ends it."""
        loop, console = asyncio.get_running_loop(), self._console
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._over.set)
        loop.add_signal_handler(signal.SIGWINCH, self._changed.set)
        with _keys(self._pressed), Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
            while not self._over.is_set():
                self._changed.clear()
                drawing = Drawing(console.width, console.height, letters=console.options.ascii_only)
                live.update(self.frame(drawing), refresh=True)
                await first_of(asyncio.sleep(DRAWN_S_MIN), self._over.wait())
                await first_of(self._changed.wait(), self._over.wait(), within_s=DRAWN_S_MAX - DRAWN_S_MIN)

    def frame(self, drawing: Drawing) -> RenderableType:
        """What there is to see now."""
        now = self._clock.now()
        self.watch.passed(now)
        self._first_worker = min(self._first_worker, max(0, len(self.watch.workers) - 1))
        clock = time.strftime("%H:%M:%S", time.localtime(self._clock.wall_ms() / 1000))
        state = State(now=now, clock=clock, connected=self._bus.connected, first_worker=self._first_worker)
        return frame(self.watch, state, drawing)

    def _told(self, take: Callable[[M, float], None]) -> Callable[[M, Envelope], None]:
        def handle(message: M, _envelope: Envelope) -> None:
            take(message, self._clock.now())
            self._changed.set()

        return handle

    def _pressed(self, key: str) -> None:
        if key in QUIT:
            self._over.set()
        elif key in DOWN:
            self._first_worker += 1
        elif key in UP:
            self._first_worker = max(0, self._first_worker - 1)
        self._changed.set()


@contextlib.contextmanager
def _keys(pressed: Callable[[str], None]) -> Iterator[None]:
    """Tell of each key at once, and leave the terminal as it was."""
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
