"""The screen of `baton up`: a live table on a terminal, plain lines elsewhere.

The supervisor updates the state of each process on the ``Board``, and the screen draws it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, TextIO, TypeVar, cast

from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from services.launcher.terminal import Console
from shared.contracts.control import ServicePhase, ServiceStatus
from shared.runtime.clock import Clock

T = TypeVar("T")


@dataclass
class Row:
    """One process. Times are seconds on the supervisor's clock."""

    name: str
    note: str = ""
    phase: ServicePhase | None = None
    """None if it was not started yet."""
    detail: str = ""
    pid: int = 0
    started_at: float = 0.0
    settled_at: float = 0.0
    """The time when it became ready or ended; 0 before that."""
    url: str = ""
    has_drained: bool = False
    """Whether it was ordered to drain, so that it is not restarted when it exits."""

    def seconds(self, now: float) -> float:
        """Duration of the present phase change, so far or in total."""
        return (self.settled_at or now) - self.started_at if self.started_at else 0.0


class Board:
    """All processes of the system, in start order."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self._listeners: list[Callable[[Row], None]] = []

    def on_change(self, listener: Callable[[Row], None]) -> None:
        """Call ``listener`` with each row whose phase or detail changed."""
        self._listeners.append(listener)

    def plan(self, name: str, note: str = "") -> None:
        """Add a process that will be started."""
        self.rows[name] = Row(name, note)

    def started(self, name: str, pid: int, now: float) -> None:
        row = self.rows[name]
        row.pid, row.started_at, row.settled_at, row.url = pid, now, 0.0, ""
        row.has_drained = False
        self.mark(name, ServicePhase.STARTING, "", now)

    def heard(self, status: ServiceStatus, now: float) -> Row | None:
        """A service published its status. Returns its row, or None for a process of another launcher."""
        row = next((row for row in self.rows.values() if row.pid and row.pid == status.pid), None)
        if row is None:
            return None
        row.url = status.url or row.url
        if row.phase is ServicePhase.DRAINING and status.phase in {ServicePhase.STARTING, ServicePhase.READY}:
            return row  # Published before it received the signal to stop.
        self.mark(row.name, status.phase, status.detail, now)
        return row

    def mark(self, name: str, phase: ServicePhase, detail: str, now: float) -> None:
        row = self.rows[name]
        if (row.phase, row.detail) == (phase, detail):
            return
        if phase in {ServicePhase.STARTING, ServicePhase.DRAINING}:
            row.settled_at = 0.0
        elif not row.settled_at:
            row.settled_at = now
        row.phase, row.detail = phase, detail
        for listener in self._listeners:
            listener(row)

    def draining(self, name: str, now: float) -> None:
        """The process was asked to stop; its duration counts from here."""
        row = self.rows[name]
        row.started_at = now
        self.mark(name, ServicePhase.DRAINING, "", now)


REDRAWS_PER_S = 6.0
MARKS = {
    None: Text("·", "dim"),
    ServicePhase.READY: Text("●", "green"),
    ServicePhase.STOPPED: Text("○", "dim"),
    ServicePhase.FAILED: Text("✗", "bold red"),
}
STYLES = {
    None: "dim",
    ServicePhase.STARTING: "cyan",
    ServicePhase.READY: "green",
    ServicePhase.DRAINING: "yellow",
    ServicePhase.STOPPED: "dim",
    ServicePhase.FAILED: "bold red",
}


class Outlet:
    """A text stream with a file descriptor that outlives its reader: when a closed terminal or an ended `tee` takes no
    more text, the descriptor leads to /dev/null from then on, so that a system still stops in order.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """See TextIO."""
        return self._kept(lambda: self._stream.write(text), len(text))

    def flush(self) -> None:
        """See TextIO."""
        self._kept(self._stream.flush, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _kept(self, attempt: Callable[[], T], otherwise: T) -> T:
        try:
            return attempt()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            return otherwise


class Screen:
    """Shows the board during start and stop, and prints messages in between."""

    def __init__(self, board: Board, clock: Clock, console: Console | None = None) -> None:
        self.console = console or Console(file=cast("IO[str]", Outlet(sys.stdout)), highlight=False)
        self.board = board
        self.clock = clock
        self._since = clock.now()
        self._spinner = Spinner("dots", style="cyan")
        self._shown: dict[str, tuple[object, str]] = {}
        if not self.console.is_terminal:
            board.on_change(self._line)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Draw the table inside this context; its last state remains on the screen."""
        self._since = self.clock.now()
        if not self.console.is_terminal:
            yield
            return
        with Live(get_renderable=self.table, console=self.console, refresh_per_second=REDRAWS_PER_S):
            yield

    def show(self, text: str) -> None:
        """Print one line with rich markup."""
        self.console.print(text, soft_wrap=True)

    def show_error(self, text: str) -> None:
        """Print an error."""
        self.console.print(f"[bold red]✗[/] {escape(text)}", soft_wrap=True)

    def table(self) -> Table:
        """Every process with its phase, duration and detail."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        table.add_column(width=1)
        table.add_column("process", no_wrap=True)
        table.add_column("phase", no_wrap=True, min_width=8)
        table.add_column("seconds", no_wrap=True, justify="right", min_width=7)
        table.add_column("detail", overflow="ellipsis", no_wrap=True, style="dim")
        now = self.clock.now()
        for row in self.board.rows.values():
            style = STYLES[row.phase]
            table.add_row(
                MARKS.get(row.phase, self._spinner),
                row.name,
                Text(row.phase.value if row.phase else "waiting", style),
                f"{row.seconds(now):.1f} s" if row.started_at else "",
                Text(row.detail or ("" if row.phase is ServicePhase.STOPPED else row.url or row.note)),
            )
        return table

    def _line(self, row: Row) -> None:
        phase = row.phase.value if row.phase else ""
        if self._shown.get(row.name) == (row.phase, row.detail):
            return
        self._shown[row.name] = (row.phase, row.detail)
        seconds = f"{self.clock.now() - self._since:6.1f} s"
        detail = row.detail or (row.url if row.phase is ServicePhase.READY else "")
        self.console.print(f"{seconds}  {row.name:<14} {phase:<9} {detail}".rstrip(), soft_wrap=True, markup=False)
