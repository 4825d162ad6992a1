"""`baton workers`: the fleet as a table; and the worker table of `baton top`, with as many columns as fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from services.launcher.bus_client import Fleet
from services.launcher.views.watch import Watch, Worker
from shared.contracts.workers import Role, WorkerPhase
from shared.text.formats import counted, duration

ENDED = (WorkerPhase.GONE, WorkerPhase.LOST)
BAR = ("━", "╸", "─")
"""Full, half and empty."""
NAME_COLUMNS_MAX = 24
MODEL_COLUMNS_MAX = 32
NARROW = 100
KV_BAR, KV_BAR_NARROW = 12, 6
FULL, NEARLY_FULL = 0.95, 0.8
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


@dataclass(frozen=True, slots=True)
class Drawing:
    """The space to draw on."""

    columns: int
    lines: int
    letters: bool = False
    """The terminal shows only ASCII."""
    fills: bool = True
    """Use all lines, with the key help in the last one; else only as many as needed."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table."""

    heading: str
    cell: Callable[[Worker], Text]
    keep: int
    """Columns with the smallest value are dropped first on a narrow terminal."""
    right: bool = True


def worker_table(watch: Watch, now: float, drawing: Drawing, lines: int, first: int) -> list[Text]:
    """At most ``lines`` lines with the heading; the last one counts hidden workers."""
    workers = watch.ordered()
    lines_free = max(1, lines - 1)
    hidden = len(workers) > lines_free
    shown = workers[min(first, max(0, len(workers) - lines_free + 1)) :][: lines_free - 1 if hidden else lines_free]
    if not workers:
        return [Text("No workers yet.", "dim")]
    columns = _columns(watch, now, drawing)
    cells = [[column.cell(worker) for column in columns] for worker in shown]
    columns, cells = _fitting(columns, cells, drawing.columns)
    wide = [max([len(one.heading), *(row[n].cell_len for row in cells)]) for n, one in enumerate(columns)]
    made = [_line([Text(one.heading, "dim") for one in columns], columns, wide)]
    made += [_line(row, columns, wide) for row in cells]
    if hidden:
        made.append(Text(f"  {len(shown)} of {counted(len(workers))} workers; j and k scroll", "dim"))
    return made


def bar(share: float, columns: int, style: str = "") -> Text:
    """Filled up to ``share``, 0.0 to 1.0."""
    whole, half, rest = BAR
    halves = round(min(1.0, max(0.0, share)) * columns * 2)
    filled = whole * (halves // 2) + half * (halves % 2)
    return Text.assemble((filled, style), (rest * (columns - len(filled)), "dim"))


def rates(per_s: float) -> str:
    """Per second, in four characters or a few more."""
    if per_s < 9.95:
        return f"{per_s:.1f}" if per_s >= 0.05 else "0"
    return f"{per_s:.0f}" if per_s < 9999.5 else f"{per_s / 1000:.1f}k" if per_s < 99_950 else f"{per_s / 1000:.0f}k"


def shortened(name: str, columns: int) -> str:
    """Names differ at their ends."""
    return name if len(name) <= columns else f"..{name[2 - columns :]}"


def _columns(watch: Watch, now: float, drawing: Drawing) -> list[Column]:
    several = len({one.record.fingerprint.revision for one in watch.workers.values()}) > 1
    kv_bar = KV_BAR if drawing.columns >= NARROW else KV_BAR_NARROW
    return [
        Column("", lambda one: Text("●", PHASE_STYLES[one.phase]), 9, right=False),
        Column("worker", lambda one: Text(shortened(one.record.worker_id, NAME_COLUMNS_MAX)), 9, right=False),
        Column("role", lambda one: Text(one.record.role.value), 8, right=False),
        Column("phase", lambda one: Text(one.phase.value, PHASE_STYLES[one.phase]), 8, right=False),
        Column("running", _counted("running"), 7),
        Column("waiting", _counted("waiting"), 7),
        Column("wait tokens", _counted("waiting_tokens"), 2),
        Column("KV", lambda one: _kv(one, kv_bar), 6, right=False),
        Column("prefill/s", lambda one: _rate(one, "computed_tokens_total", Role.STORE), 6),
        Column("decode/s", lambda one: _rate(one, "generation_tokens_total", Role.PREFILL, Role.STORE), 6),
        Column("KV in/s", lambda one: _rate(one, "received_tokens_total", Role.PREFILL, Role.STORE), 3),
        Column("ITL", _itl, 3),
        Column("pinned", _pins, 1),
        Column("preempted", _counted("preemptions_total"), 0),
        Column("silent", lambda one: _silent(one, now), 4),
        Column("revision", _revision, 5 if several else 0, right=False),
        Column("model", _model, 0, right=False),
    ]


def _fitting(columns: list[Column], cells: list[list[Text]], most: int) -> tuple[list[Column], list[list[Text]]]:
    """Less the columns that say nothing, and of the others those that have no room."""
    said = [any(row[n].plain.strip(" 0-") for row in cells) or one.keep >= 7 for n, one in enumerate(columns)]
    chosen = [number for number, says in enumerate(said) if says]

    def wide(numbers: list[int]) -> int:
        return sum(max([len(columns[n].heading), *(row[n].cell_len for row in cells)]) + 1 for n in numbers) - 1

    while wide(chosen) > most and len(chosen) > 2:
        chosen.remove(min(reversed(chosen), key=lambda number: columns[number].keep))
    return [columns[number] for number in chosen], [[row[number] for number in chosen] for row in cells]


def _line(cells: list[Text], columns: list[Column], wide: list[int]) -> Text:
    line = Text(no_wrap=True)
    for cell, column, width in zip(cells, columns, wide, strict=True):
        gap = " " * (width - cell.cell_len)
        line.append_text(Text.assemble(gap if column.right else "", cell, "" if column.right else gap, " "))
    line.rstrip()
    return line


def _counted(name: str) -> Callable[[Worker], Text]:
    def cell(one: Worker) -> Text:
        if one.load is None or one.phase in ENDED or one.record.role is Role.STORE:
            return Text("")
        number: int = getattr(one.load, name)
        return Text(counted(number), "" if number else "dim")

    return cell


def _kv(one: Worker, columns: int) -> Text:
    if one.load is None or one.phase in ENDED:
        return Text("")
    used = one.kv_used
    is_short = one.record.role is not Role.STORE  # A full store is normal.
    style = "red" if is_short and used >= FULL else "yellow" if is_short and used >= NEARLY_FULL else "green"
    return Text.assemble(bar(used, columns, style), f"{used:>4.0%}")


def _rate(one: Worker, name: str, *never: Role) -> Text:
    per_s = one.per_s(name)
    if one.phase in ENDED or one.record.role in never:
        return Text("")
    return Text(rates(per_s), "" if per_s else "dim")


def _itl(one: Worker) -> Text:
    load = one.load
    shown = load is not None and load.running and one.phase not in ENDED and one.record.role is not Role.PREFILL
    return Text(duration(load.decode_s_per_token) if load is not None and shown and load.decode_s_per_token else "")


def _pins(one: Worker) -> Text:
    pinned = one.load.exchange.pinned_blocks if one.load is not None and one.load.exchange is not None else 0
    return Text(counted(pinned) if pinned else "")


def _silent(one: Worker, now: float) -> Text:
    silent_s = now - one.heard
    return Text(f"{silent_s:.0f} s", "yellow") if silent_s >= 2.0 else Text("")


def _revision(one: Worker) -> Text:
    return Text(one.record.fingerprint.revision[:12])


def _model(one: Worker) -> Text:
    name = one.record.model
    return Text(shortened(name, MODEL_COLUMNS_MAX), "dim")


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
