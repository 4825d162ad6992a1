"""`baton workers`: the fleet as a table."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from services.launcher.bus_client import Fleet
from shared.contracts.workers import WorkerPhase

COLUMNS_OF_ALL = 110
PHASE_STYLES = {
    WorkerPhase.STARTING: "cyan",
    WorkerPhase.PROBING: "cyan",
    WorkerPhase.READY: "green",
    WorkerPhase.DRAINING: "yellow",
    WorkerPhase.ASLEEP: "blue",
    WorkerPhase.GONE: "dim",
    WorkerPhase.LOST: "bold red",
}


def fleet_table(fleet: Fleet, columns: int) -> Table:
    """One line for each worker; a narrow terminal gets fewer columns. The registry has no load: it shows as ``?``."""
    source = "From the registry: no orchestrator responds." if fleet.from_registry else f"Leader: {fleet.state.leader}"
    table = Table(
        box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", caption=source, caption_justify="left"
    )
    for heading in ("worker", "role", "phase"):
        table.add_column(heading, no_wrap=True)
    for heading in ("model", "engine", "host:pid") if columns >= COLUMNS_OF_ALL else ("model",):
        table.add_column(heading, overflow="fold")  # Rich narrows these first.
    for heading in ("running", "waiting", "KV used", "in phase"):
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("note")
    for worker in sorted(fleet.state.workers, key=lambda w: w.record.worker_id):
        record = worker.record
        has_load = not fleet.from_registry
        table.add_row(
            record.worker_id,
            record.role.value,
            Text(worker.phase.value, PHASE_STYLES[worker.phase]),
            record.model,
            *((record.engine, f"{record.host}:{record.pid}") if columns >= COLUMNS_OF_ALL else ()),
            str(worker.running) if has_load else "?",
            str(worker.waiting) if has_load else "?",
            f"{worker.kv_used:.0%}" if has_load else "?",
            rough_duration(worker.since_s) if has_load else "?",
            Text(record.note, "dim"),
        )
    return table


def rough_duration(seconds: float) -> str:
    """In seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
