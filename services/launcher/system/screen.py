"""The screen of `baton up`: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from services.launcher.system.board import Board, Row
from shared.contracts.control import ServicePhase
from shared.runtime.clock import Clock

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


class Screen:
    """Shows the board during start and stop, and prints messages in between."""

    def __init__(self, board: Board, clock: Clock, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
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
