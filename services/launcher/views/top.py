"""`baton top`: subscribes to the whole system's reports and draws them. It does not poll.

It uses the terminal's own colours, so that it suits any theme.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from services.launcher.bus_client import open_bus
from services.launcher.views.watch import WINDOW_S, Event, Traffic, Watch
from services.launcher.views.workers import PHASE_STYLES, Drawing, bar, rates, shortened, worker_table
from shared.bus.port import Bus, Envelope, watch_store
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
from shared.contracts.inference import RequestFinished
from shared.contracts.planning import PlanDecision
from shared.contracts.workers import WorkerPhase
from shared.runtime.clock import Clock, SystemClock
from shared.runtime.waiting import first_of
from shared.text.formats import counted, duration, in_bytes

M = TypeVar("M", bound=msgspec.Struct)

DRAWN_S_MIN = 0.2
"""Shortest time between two frames."""
DRAWN_S_MAX = 1.0
"""Longest time between two frames: ages grow without any message."""
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
        async for entry in watch_store(self._bus, WORKER_RECORDS):
            if entry is None:
                continue
            if entry.value is None:
                self.watch.record_removed(WorkerId(entry.key), self._clock.now())
            else:
                self.watch.record(entry.value, self._clock.now())
            self._changed.set()

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


SPARKS = "▁▂▃▄▅▆▇█"
LETTERS = str.maketrans("→…●━╸─" + SPARKS, ">.*#--" + "._-=+*%#")
"""Replacements for terminals that show only ASCII."""
SPARK_S = 30
WIDE = 140
"""From this width two tables are drawn side by side."""
BELOW_MIN = 9
"""Lines that the worker table leaves for the tables below it."""
FLOW_BAR = 12
HEALTH_STYLES = {"healthy": "bold green", "degraded": "bold yellow", "unhealthy": "bold red"}
FLOWS_MAX = 16
LISTENED_S = 2.5
"""After this time every process has published something."""
TRAFFIC_LINES_MAX = 6
"""Including one line for each model with a plan."""


@dataclass(frozen=True, slots=True)
class State:
    """What a frame needs beside the watch."""

    now: float
    clock: str
    """Local wall-clock time."""
    connected: bool = True
    first_worker: int = 0
    """Number of workers scrolled out at the top."""


def frame(watch: Watch, state: State, drawing: Drawing) -> RenderableType:
    """A frame of at most ``drawing.lines`` lines and ``drawing.columns`` columns."""
    traffic = watch.traffic(state.now)
    head = [*_head(watch, state, drawing), *_traffic(watch, traffic, state, drawing), Text("")]
    lines_free = drawing.lines - len(head) - 1
    workers = worker_table(watch, state.now, drawing, lines_free - min(BELOW_MIN, lines_free // 2), state.first_worker)
    lines = [*head, *workers]
    below = drawing.lines - len(lines) - 2
    if below >= 3:
        lines += [Text(""), *_below(watch, traffic, state, drawing, below)]
    lines = lines[: drawing.lines - 1]
    if drawing.fills:
        lines += [Text("")] * (drawing.lines - 1 - len(lines))
        lines.append(_foot(watch))
    for line in lines:
        line.truncate(drawing.columns, overflow="ellipsis")
        if drawing.letters:
            line.plain = line.plain.translate(LETTERS)
    return Group(*lines)


def _head(watch: Watch, state: State, drawing: Drawing) -> list[Text]:
    line = Text.assemble(("Baton", "bold"), "  ", no_wrap=True)
    listening = state.now - watch.begun < LISTENED_S
    if not listening:
        health = watch.health(connected=state.connected)
        line.append_text(Text.assemble((health, HEALTH_STYLES[health]), "  "))
    counts = watch.counts()
    for role, ready, live in counts:
        style = "green" if ready == live else "yellow"
        line.append_text(Text.assemble((f"{ready}" if ready == live else f"{ready}/{live}", style), f" {role}  "))
    if not counts:
        line.append("listening  " if listening else "no workers  ", "dim" if listening else "yellow")
    routers = sum(service == "router" for service, _instance in watch.services)
    right = Text.assemble(f"{routers} router{'s' if routers != 1 else ''}  ")
    if watch.leader:
        right.append(f"leader {shortened(watch.leader, 20)}  ")
    elif not listening:
        right.append("no leader  ", "yellow")
    right.append(state.clock)
    if not state.connected:
        right = Text("NATS does not respond, reconnecting", "bold red")
    gap = drawing.columns - line.cell_len - right.cell_len
    if gap < 1:
        return [line, right]
    return [Text.assemble(line, " " * gap, right)]


def _traffic(watch: Watch, traffic: Traffic, state: State, drawing: Drawing) -> list[Text]:
    known = traffic.count > 0
    first = Text.assemble(("requests ", "dim"), f"{traffic.per_s:.1f}/s ", no_wrap=True)
    first.append(_sparks(watch.each_second(state.now, min(SPARK_S, drawing.columns // 6))), "cyan")
    first.append_text(Text.assemble(("   prefill ", "dim"), rates(traffic.prompt_tokens_per_s), (" tok/s", "dim")))
    first.append_text(Text.assemble(("   decode ", "dim"), rates(traffic.completion_tokens_per_s), (" tok/s", "dim")))
    second = Text(no_wrap=True)
    for name, (half, most) in (("TTFT", traffic.ttft_s), ("ITL", traffic.itl_s)):
        spread = f"{duration(half)}, p95 {duration(most)}" if half >= 0 else "-"
        second.append_text(Text.assemble((f"{name} ", "dim"), spread, "   "))
    for mode, count in traffic.modes.most_common(3):
        share = Text.assemble(f"{count / max(1, traffic.count):.0%} ", (f"{mode.replace('_', ' ')}  ", "dim"))
        if second.cell_len + share.cell_len <= drawing.columns:
            second.append_text(share)
    failed = sum(traffic.failed.values())
    third = Text(f"no requests in the last {WINDOW_S} s", "dim", no_wrap=True) if not known else Text()
    if failed:
        why = ", ".join(f"{count} {reason}" for reason, count in traffic.failed.most_common(3))
        third = Text(f"{failed} failed in the last {WINDOW_S} s: {printable(why)}", "red", no_wrap=True)
    lines = [first, second if known else third, *([third] if failed and known else [])]
    return [*lines, *(_plan(plan) for plan in watch.plans.values() if plan.roles)][:TRAFFIC_LINES_MAX]


def _plan(plan: PlanDecision) -> Text:
    """Present and wanted workers of a model; green where they agree."""
    line = Text.assemble(("planner ", "dim"), no_wrap=True)
    for one in plan.roles:
        enough = one.now == one.wanted
        wanted = f"{one.now}" if enough else f"{one.now}, wants {one.wanted}"
        line.append_text(Text.assemble(f"{one.role.value} ", (wanted, "green" if enough else "yellow")))
        line.append(f" at {one.load:.0%}   ", "dim")
    line.append(printable(plan.why), "dim")
    return line


def _below(watch: Watch, traffic: Traffic, state: State, drawing: Drawing, lines: int) -> list[Text]:
    """Flows and requests, then events."""
    newest = list(watch.events)[::-1]
    events = min(len(newest) + 1, max(3, lines // 2)) if newest else 0
    tables = lines - (events + 1 if events else 0)
    made: list[Text] = []
    if traffic.count and tables >= 3:
        if drawing.columns >= WIDE:
            left = _flows(watch, drawing.columns // 2 - 6, tables)
            right = _requests(watch, state, drawing.columns - drawing.columns // 2 + 3, tables)
            made += _beside(left, right, drawing.columns // 2 - 3)
        else:
            flows = _flows(watch, drawing.columns, max(3, tables // 2))
            made += flows
            rest = tables - len(flows) - 1
            made += [Text(""), *_requests(watch, state, drawing.columns, rest)] if rest >= 2 else []
        made.append(Text(""))
    if events:
        made += [Text("events", "bold"), *(_event(one, state) for one in newest[: events - 1])]
    return made[:lines]


def _flows(watch: Watch, columns: int, lines: int) -> list[Text]:
    flows = watch.flows()[: max(0, min(FLOWS_MAX, lines - 1))]
    most = max((many for _prefill, _decode, many, _size in flows), default=1)
    names = [f"{prefill} → {decode}" if prefill else f"{decode} alone" for prefill, decode, _many, _size in flows]
    wide = max(10, min(max(map(len, names), default=10), columns - FLOW_BAR - 20))
    made = [Text(f"KV flows, last {WINDOW_S} s", "bold", no_wrap=True)]
    for name, (_prefill, _decode, many, size) in zip(names, flows, strict=True):
        kv = f"{in_bytes(size)} KV" if size else ""
        line = Text.assemble(f"{shortened(name, wide):<{wide}} ", bar(many / most, FLOW_BAR, "cyan"))
        made.append(Text.assemble(line, f" {counted(many):>6} ", (f"{kv:>13}", "dim"), no_wrap=True))
    return made


def _requests(watch: Watch, state: State, columns: int, lines: int) -> list[Text]:
    made = [Text("recent requests", "bold", no_wrap=True)]
    for at, request in list(watch.requests)[::-1][: max(0, lines - 1)]:
        line = _request(request, f"{state.now - at:3.0f} s ")
        line.truncate(columns, overflow="ellipsis")
        made.append(line)
    return made


def _request(request: RequestFinished, ago: str) -> Text:
    workers = request.decode_worker or "not placed"
    workers = f"{request.prefill_worker} → {workers}" if request.prefill_worker else workers
    line = Text.assemble((ago, "dim"), f"{shortened(workers, 30):<24} ", no_wrap=True)
    if request.reason or request.status >= 400:
        line.append(f"{request.status} {printable(request.reason)}", "red" if request.status >= 500 else "yellow")
        return line
    cached = f", {request.cached_tokens / request.prompt_tokens:.0%} cached" if request.cached_tokens > 0 else ""
    line.append(f"{counted(max(0, request.prompt_tokens)):>6} tok{cached:<13} ")
    line.append(f"TTFT {duration(request.ttft_s)}" if request.ttft_s >= 0 else "", "")
    line.append(f"  ITL {duration(request.itl_s)}" if request.itl_s >= 0 else "", "dim")
    if request.resumes:
        line.append(f"  resumed {request.resumes}x", "yellow")
    return line


def _event(one: Event, state: State) -> Text:
    ago = f"{_ago(state.now - one.at):>5}  "
    style = "red" if one.bad else ""
    return Text.assemble(
        (ago, "dim"), (f"{printable(one.subject)} ", "bold"), (printable(one.text), style), no_wrap=True
    )


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} m"


def _foot(watch: Watch) -> Text:
    unready = [one for one in watch.ordered() if one.phase in (WorkerPhase.STARTING, WorkerPhase.PROBING)]
    line = Text.assemble(("q", "bold"), (" quit   ", "dim"), ("j k", "bold"), (" scroll workers", "dim"), no_wrap=True)
    if unready and unready[0].record.note:
        note = f"   {unready[0].record.worker_id}: {unready[0].record.note}"
        line.append(printable(note), PHASE_STYLES[unready[0].phase])
    return line


def _beside(left: Sequence[Text], right: Sequence[Text], columns: int) -> list[Text]:
    made = []
    for number in range(max(len(left), len(right))):
        one = left[number] if number < len(left) else Text("")
        one.truncate(columns, overflow="ellipsis", pad=True)
        made.append(Text.assemble(one, right[number] if number < len(right) else "", no_wrap=True))
    return made


def _sparks(counts: Sequence[int]) -> str:
    """A bar of blocks; a space for zero."""
    most = max(counts, default=0)
    return "".join(SPARKS[one * len(SPARKS) // (most + 1)] if one else " " for one in counts)


def printable(text: str) -> str:
    """Without control characters: some text comes from clients."""
    return text if text.isprintable() else ascii(text)
