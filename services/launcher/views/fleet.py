"""`baton workers`: who is in the fleet, asked of the orchestrator, or read from the registry when there is none."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from services.launcher.cluster.access import launcher_access
from shared.bus.nats_bus import connect_nats
from shared.bus.port import AskTimedOut, Bus, NoResponders
from shared.contracts.channels import DESCRIBE_FLEET, WORKER_RECORDS
from shared.contracts.workers import WORKER_RECORD_TTL_S, DescribeFleet, FleetState, FleetWorker, WorkerPhase

CONNECT_S_MAX = 5.0
ASK_S_MAX = 3.0
PHASE_STYLES = {
    WorkerPhase.STARTING: "cyan",
    WorkerPhase.PROBING: "cyan",
    WorkerPhase.READY: "green",
    WorkerPhase.DRAINING: "yellow",
    WorkerPhase.GONE: "dim",
    WorkerPhase.LOST: "bold red",
}


@dataclass(frozen=True)
class Fleet:
    """The fleet, and whether an orchestrator vouches for it."""

    state: FleetState
    from_registry: bool

    @property
    def worker_ids(self) -> list[str]:
        """Ids that are in use."""
        gone = {WorkerPhase.GONE, WorkerPhase.LOST}
        return [worker.record.worker_id for worker in self.state.workers if worker.phase not in gone]


async def read_fleet(nats_url: str) -> Fleet:
    """Ask once. Raises BusError when NATS does not answer."""
    async with open_bus(nats_url) as bus:
        try:
            return Fleet(await bus.ask(DESCRIBE_FLEET, DescribeFleet(), timeout_s=ASK_S_MAX), from_registry=False)
        except (NoResponders, AskTimedOut):
            records = await (await bus.key_value_store(WORKER_RECORDS, ttl_s=WORKER_RECORD_TTL_S)).all()
    workers = [
        FleetWorker(record=kept.value, phase=kept.value.phase, since_s=0.0, silent_s=0.0)
        for kept in records
        if kept.value is not None
    ]
    return Fleet(FleetState(leader="", term=0, workers=workers), from_registry=True)


@contextlib.asynccontextmanager
async def open_bus(nats_url: str) -> AsyncIterator[Bus]:
    """A short-lived connection of the command line."""
    bus = await connect_nats(nats_url, name="baton-cli", connect_s_max=CONNECT_S_MAX, access=launcher_access())
    try:
        yield bus
    finally:
        await bus.close()


def fleet_table(fleet: Fleet) -> Table:
    """One line per worker."""
    by = "read from the registry: no orchestrator answers" if fleet.from_registry else f"{fleet.state.leader} leads"
    table = Table(
        box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", caption=by, caption_justify="left"
    )
    for heading in ("worker", "role", "phase", "model", "engine", "host:pid"):
        table.add_column(heading, no_wrap=True)
    for heading in ("run", "wait", "KV", "for"):
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("note")
    for worker in sorted(fleet.state.workers, key=lambda w: w.record.worker_id):
        record = worker.record
        live = not fleet.from_registry
        table.add_row(
            record.worker_id,
            record.role.value,
            Text(worker.phase.value, PHASE_STYLES[worker.phase]),
            record.models[0] if record.models else "",
            record.engine,
            f"{record.host}:{record.pid}",
            str(worker.running) if live else "?",
            str(worker.waiting) if live else "?",
            f"{worker.kv_used:.0%}" if live else "?",
            duration(worker.since_s) if live else "?",
            Text(record.note, "dim"),
        )
    return table


def duration(seconds: float) -> str:
    """Roughly, for a person."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
