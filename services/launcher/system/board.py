"""The state of each process: the screen draws it, the supervisor updates it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.contracts.control import ServicePhase, ServiceStatus


@dataclass
class Row:
    """One process. Times are seconds on the supervisor's clock."""

    name: str
    note: str = ""
    phase: ServicePhase | None = None
    """None: not started yet."""
    detail: str = ""
    pid: int = 0
    started_at: float = 0.0
    settled_at: float = 0.0
    """When it became ready or ended; 0 before that."""
    url: str = ""
    has_drained: bool = False
    """It was ordered to drain, so it is not restarted when it exits."""

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
        """The process was started or restarted."""
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
        """Set the phase of a process."""
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
