"""`baton workers`: the fleet as a table, once or refreshed until Ctrl-C."""

from __future__ import annotations

import asyncio
import re
import signal

from rich.live import Live
from rich.table import Table
from rich.text import Text

from services.launcher.bus_client import Fleet, describe_fleet, open_bus
from services.launcher.terminal import Console
from shared.bus.port import BusError
from shared.contracts.workers import WorkerPhase
from shared.runtime.waiting import first_of
from shared.text.formats import long_duration

WATCH_S = 1.0
"""Pause between two frames of `baton workers --watch`."""
COLUMNS_OF_ALL = 110
"""Width from which the table has all columns."""
PHASE_STYLES = {
    WorkerPhase.STARTING: "cyan",
    WorkerPhase.PROBING: "cyan",
    WorkerPhase.READY: "green",
    WorkerPhase.DRAINING: "yellow",
    WorkerPhase.ASLEEP: "blue",
    WorkerPhase.GONE: "dim",
    WorkerPhase.LOST: "bold red",
}


async def watch_fleet(nats_url: str, console: Console) -> None:
    """Draws the table again and again, until SIGINT. Raises BusError if NATS does not respond at first.

    The signal sets an event: a cancellation, which asyncio makes of it otherwise, may be lost in a library's wait.
    """
    stop = asyncio.Event()
    async with open_bus(nats_url) as bus:
        table = fleet_table(await describe_fleet(bus), console.width)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
        with Live(table, console=console, screen=True, auto_refresh=False) as live:
            while not stop.is_set():
                live.refresh()
                await first_of(stop.wait(), asyncio.sleep(WATCH_S))
                try:
                    fleet = await first_of(describe_fleet(bus), stop.wait())
                except BusError as error:
                    table.caption = Text(f"NATS does not respond: {error}", "bold red")
                else:
                    table = fleet_table(fleet, console.width) if fleet is not None else table
                live.update(table)


def fleet_table(fleet: Fleet, columns: int) -> Table:
    """One line for each worker. A narrow terminal gets fewer columns, with the notes below them. The registry has no
    load: it shows as ``?``.
    """
    is_wide = columns >= COLUMNS_OF_ALL
    workers = sorted(fleet.state.workers, key=lambda each: natural_order(each.record.worker_id))
    source = "From the registry: no orchestrator responds." if fleet.from_registry else f"Leader: {fleet.state.leader}"
    notes = [] if is_wide else [f"{each.record.worker_id}: {each.record.note}" for each in workers if each.record.note]
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
        caption=Text("\n".join([source, *notes])),
        caption_style="dim",
        caption_justify="left",
    )
    for heading in ("worker", "role", "phase"):
        table.add_column(heading, no_wrap=True)
    for heading in ("model", "engine", "host:pid") if is_wide else ("model",):
        table.add_column(heading, overflow="fold")  # Rich narrows these first.
    for heading in ("running", "waiting", "KV used", "in phase"):
        table.add_column(heading, no_wrap=True, justify="right")
    if is_wide:
        table.add_column("note")
    for worker in workers:
        record = worker.record
        has_load = not fleet.from_registry
        table.add_row(
            Text(record.worker_id),
            record.role.value,
            Text(worker.phase.value, PHASE_STYLES[worker.phase]),
            Text(record.model),
            *((Text(record.engine), Text(f"{record.host}:{record.pid}")) if is_wide else ()),
            str(worker.running) if has_load else "?",
            str(worker.waiting) if has_load else "?",
            f"{worker.kv_used:.0%}" if has_load else "?",
            long_duration(worker.since_s) if has_load else "?",
            *((Text(record.note, "dim"),) if is_wide else ()),
        )
    return table


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sorts decode-2 before decode-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split("([0-9]+)", name) if part]
