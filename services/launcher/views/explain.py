"""`baton explain`: fetches a decision, from any router over HTTP or from its own router over NATS, and draws it.

Legible without colour, in 80 columns, and in a pipe.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

import httpx
import msgspec
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from services.launcher.bus_client import CommandFailed, ask_service, first_status, open_bus
from services.launcher.router_api import base_of, decoded, reaching
from services.launcher.system.machine import API_KEY_VARIABLE, key_headers
from services.launcher.terminal import Console
from shared.contracts.channels import DECISION
from shared.contracts.decisions import AskDecision, CandidateRecord, DecisionRecord, Part
from shared.contracts.ids import DecisionId, router_of
from shared.text import explanation
from shared.text.explanation import NO_DECISION_ID, not_kept, router_away
from shared.text.formats import counted, duration

LATEST = "latest"
"""End of a decision id; the id of its router comes before it."""
HTTP_S_MAX = 10.0
ASK_S_MAX = 3.0
ROUTER_STATUS_S_MAX = 5.0
"""Routers publish their status every two seconds."""


class DecisionList(msgspec.Struct):
    """The response of ``GET /baton/decisions``."""

    decisions: list[DecisionRecord]


@dataclass(frozen=True)
class Query:
    """A decision by its id (or ``latest``), or the last one for a request."""

    decision_id: str = LATEST
    request_id: str = ""


def query_of(name: str, request_id: str) -> Query:
    """``name`` may be the id of a decision or of a request."""
    if request_id:
        return Query(request_id=request_id)
    return Query(name) if name == LATEST or router_of(name) else Query(request_id=name)


async def ask_router(url: str, query: Query) -> DecisionRecord:
    """Fetch over HTTP. Raises CommandFailed."""
    base = base_of(url)
    with reaching(base):
        async with httpx.AsyncClient(
            base_url=base, timeout=HTTP_S_MAX, headers=key_headers(), trust_env=False
        ) as client:
            decision_id = query.decision_id
            if query.request_id:
                params: dict[str, str | int] = {"request_id": query.request_id, "limit": 1}
                listed = await client.get("/baton/decisions", params=params)
                found = decoded(listed, DecisionList, base, KEY_HINT).decisions
                if not found:
                    raise CommandFailed(f"No router has a decision for the request {query.request_id}. {REQUEST_HINT}")
                decision_id = found[0].decision_id
            response = await client.get(f"/baton/decisions/{quote(decision_id, safe='')}")
            return decoded(response, DecisionRecord, base, KEY_HINT)


KEY_HINT = f"Set {API_KEY_VARIABLE} to an API key with the permission view or admin."
REQUEST_HINT = (
    "The response header x-request-id has its id. Routers keep only the newest decisions (ROUTER_DECISIONS_BYTES_MAX)."
)


async def ask_over_nats(nats_url: str, query: Query) -> DecisionRecord:
    """Fetch from the router that made the decision; if the query does not name it, from any router over HTTP. Raises
    CommandFailed, BusError.
    """
    if query.request_id or query.decision_id == LATEST:
        return await ask_router(await any_router(nats_url), query)
    router_id = router_of(query.decision_id)
    if not router_id:
        raise CommandFailed(f"{query.decision_id}: {NO_DECISION_ID}")
    ask = AskDecision(router_id=router_id, decision_id=DecisionId(query.decision_id))
    found = (await ask_service(nats_url, DECISION, ask, s_max=ASK_S_MAX, missing=router_away(router_id))).decision
    if found is None:
        raise CommandFailed(not_kept(router_id))
    return found


async def any_router(nats_url: str) -> str:
    """The HTTP address of some router. Raises CommandFailed, BusError."""
    async with open_bus(nats_url) as bus:
        status = await first_status(bus, "router", "", ROUTER_STATUS_S_MAX, lambda status: bool(status.url))
    if status is None:
        raise CommandFailed(f"No router on {nats_url} has published its status within {ROUTER_STATUS_S_MAX:g} s.")
    return status.url


PREDICTED, MEASURED = "cyan", "green"
MISSED, QUIET = "bold red", "dim"
LEFT_COLUMNS = 36
"""Columns of the waterfall before its bars: names and numbers."""
BAR_COLUMNS_MIN, BAR_COLUMNS_MAX = 20, 80
HEADINGS = {
    Part.PREFILL: "Candidates for prefill",
    Part.DECODE: "Candidates for decode",
    Part.WHOLE: "Candidates for both phases",
}
COLUMNS = (
    ("cached", "cached_tokens"),
    ("fetch", "fetched_tokens"),
    ("compute", "computed_tokens"),
    ("queue", "queue_s"),
    ("fetching", "fetch_s"),
    ("prefill", "prefill_s"),
    ("handoff", "handoff_s"),
    ("decode", "decode_s"),
    ("others", "others_s"),
)
"""Columns of the candidates; one without any value is left out. All times add up to the cost."""
LEFT_OUT = ("computed_tokens", "fetch_s", "handoff_s", "fetched_tokens", "others_s")
"""Columns that are dropped first on a narrow terminal; the cost still includes them."""
NAME_COLUMNS_MAX = 24
NAME_COLUMNS_NARROW = 14


@dataclass(frozen=True)
class Glyphs:
    """Characters of the bars."""

    predicted: str
    measured: str
    both: str
    sliver: str
    """Mark of a part that is shorter than one column."""
    chosen: str
    both_style: str = ""


COLOURED = Glyphs("▀", "▄", "▀", "▏", "●", f"{PREDICTED} on {MEASURED}")
BLOCKS = Glyphs("▀", "▄", "█", "▏", "●")
LETTERS = Glyphs("^", "_", "#", "|", "*")
"""Glyphs for terminals that show only ASCII."""


def draw(decision: DecisionRecord, console: Console) -> None:
    """Print the whole decision."""
    has_colour = console.color_system is not None and not console.no_color
    glyphs = LETTERS if console.options.ascii_only else COLOURED if has_colour else BLOCKS
    for section in _sections(explanation.printable(decision), console.width, glyphs):
        console.print(section, highlight=False)


def _sections(decision: DecisionRecord, columns: int, glyphs: Glyphs) -> Iterator[RenderableType]:
    yield Text(explanation.headline(decision), "bold")
    why = explanation.because(decision)
    for sentence in why:
        yield Text(sentence)
    yield Text("")
    yield _facts(decision)
    if decision.predicted.total_s() or decision.measured is not None:
        yield Text("")
        yield Text.assemble(("Time to first token", "bold"), f": {explanation.ttft_text(decision)}")
        yield Padding(_waterfall(decision, columns, glyphs), (0, 0, 0, 2))
    for part in Part:
        candidates = [one for one in decision.candidates if one.part is part]
        if candidates:
            yield Text("")
            yield Text(_heading(decision, part, len(candidates)), "bold")
            yield Padding(_candidates(candidates, columns - 2, glyphs), (0, 0, 0, 2))
    if regret := explanation.regret_text(decision):
        yield Text("")
        yield Text(regret, MISSED if decision.regret_s > 0 else "")


def _facts(decision: DecisionRecord) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style=QUIET, no_wrap=True)
    table.add_column()
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(decision.at_unix_s))
    table.add_row("decision", Text(f"{decision.decision_id}   {when}", overflow="fold"))
    table.add_row("model", Text(decision.model or "any", overflow="fold"))
    if decision.mode:
        table.add_row("mode", f"{decision.mode}: {decision.reason}")
        table.add_row("prompt", explanation.cached_text(decision))
    if threshold := explanation.threshold_text(decision):
        table.add_row("threshold", threshold)
    _add_prefetch(table, decision)
    for source in decision.sources:
        until = f", up to the boundary at {counted(source.boundary)} tokens" if source.boundary else ""
        table.add_row("KV from", f"{source.worker_id}, {_blocks(source.first, source.end)}{until}")
    if decision.attempt > 1:
        table.add_row("attempt", f"{decision.attempt}; the previous one: baton explain {decision.earlier}")
    if decision.tenant or decision.priority:
        table.add_row("tenant", f"{decision.tenant or 'none'}, priority {decision.priority}")
    for sentence in explanation.target_text(decision):
        table.add_row("target", Text(sentence, MISSED if "missed" in sentence else ""))
    if gap := explanation.gap_text(decision):
        table.add_row("gap", Text(gap, overflow="fold"))
    if any(one.within_s for one in decision.candidates):
        table.add_row("", "decode time within the ITL target adds no cost")
    if decision.itl_s >= 0 or decision.predicted_itl_s > 0:
        table.add_row("ITL", _itl(decision))
    if decision.drafted_tokens > 0:
        table.add_row("drafts", explanation.drafts_text(decision))
    if decision.recompute_slowed_s > 0:
        slowed = duration(decision.recompute_slowed_s)
        table.add_row(
            "recompute", f"KV was lost; what was computed again was slowed for {slowed} beside ready requests"
        )
    return table


def _add_prefetch(table: Table, decision: DecisionRecord) -> None:
    if prefetch := explanation.prefetch_text(decision):
        table.add_row("prefetch", Text(prefetch, overflow="fold"))


def _blocks(first: int, end: int) -> str:
    if end:
        return f"blocks {counted(first)} to {counted(end)}"
    return f"from block {counted(first)} on" if first else "all that it has"


def _itl(decision: DecisionRecord) -> str:
    values = [f"{duration(decision.predicted_itl_s)} predicted"] if decision.predicted_itl_s > 0 else []
    return ", ".join([*values, f"{duration(decision.itl_s)} measured"] if decision.itl_s >= 0 else values)


def _waterfall(decision: DecisionRecord, columns: int, glyphs: Glyphs) -> Table:
    """One line for each part; each bar starts where the previous one ends."""
    predicted, measured = decision.predicted, decision.measured
    whole_s = max(predicted.total_s(), measured.total_s() if measured is not None else 0.0)
    wide = min(BAR_COLUMNS_MAX, max(BAR_COLUMNS_MIN, columns - LEFT_COLUMNS - 4))
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True, min_width=15)
    table.add_column(style=PREDICTED, no_wrap=True, justify="right", min_width=9)
    table.add_column(style=MEASURED, no_wrap=True, justify="right", min_width=8)
    table.add_column(no_wrap=True, min_width=wide)
    scale = duration(whole_s)
    axis = Text("0" + " " * (wide - 1 - len(scale)) + scale, QUIET)
    table.add_row("", "predicted", "measured" if measured is not None else "", axis)
    before = [0.0, 0.0]
    for name, label in explanation.PART_NAMES.items():
        parts_s = [getattr(predicted, name), getattr(measured, name) if measured is not None else 0.0]
        if not any(parts_s):
            continue
        spans = [_span(begin_s, part_s, whole_s, wide) for begin_s, part_s in zip(before, parts_s, strict=True)]
        cells = [_duration_or_dash(part_s) for part_s in parts_s]
        table.add_row(label, cells[0], cells[1] if measured is not None else "", _bar(spans, wide, glyphs))
        before = [begin_s + part_s for begin_s, part_s in zip(before, parts_s, strict=True)]
    total = [duration(predicted.total_s()), duration(measured.total_s()) if measured is not None else ""]
    table.add_row(Text("total", "bold"), *(Text(one, "bold") for one in total), _legend(decision, glyphs))
    return table


def _span(begin_s: float, part_s: float, whole_s: float, wide: int) -> tuple[int, int]:
    """First column and the one after the last; equal for a part shorter than one column."""
    return round(begin_s / whole_s * wide), round((begin_s + part_s) / whole_s * wide)


def _bar(spans: list[tuple[int, int]], wide: int, glyphs: Glyphs) -> Text:
    (first, first_end), (second, second_end) = spans
    bar = Text()
    for column in range(wide):
        above, below = first <= column < first_end, second <= column < second_end
        if above and below:
            bar.append(glyphs.both, glyphs.both_style)
        elif above:
            bar.append(glyphs.predicted, PREDICTED)
        elif below:
            bar.append(glyphs.measured, MEASURED)
        elif column in (min(first, wide - 1), min(second, wide - 1)) and first == first_end and second == second_end:
            bar.append(glyphs.sliver, QUIET)
        else:
            bar.append(" ")
    return bar


def _legend(decision: DecisionRecord, glyphs: Glyphs) -> Text:
    if decision.measured is None:
        return Text.assemble((glyphs.predicted, PREDICTED), (" predicted", QUIET))
    return Text.assemble(
        (glyphs.predicted, PREDICTED),
        (" predicted  ", QUIET),
        (glyphs.measured, MEASURED),
        (" measured  ", QUIET),
        (glyphs.both, glyphs.both_style),
        (" both", QUIET),
    )


def _heading(decision: DecisionRecord, part: Part, shown: int) -> str:
    of = f" ({shown} of {counted(decision.considered)} workers)" if decision.considered > shown else ""
    return f"{HEADINGS[part]}{of}"


def _candidates(candidates: list[CandidateRecord], columns: int, glyphs: Glyphs) -> Table:
    """Chosen first, then by cost, with as many columns as fit."""
    chosen = next((one for one in candidates if one.chosen), None)
    ordered = sorted(candidates, key=lambda one: (not one.chosen, one.cost_s))
    lines, gap = _fitting(ordered, [explanation.why_not(one, chosen) for one in ordered], columns)
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style=QUIET)
    table.add_column("", width=1)
    for heading, *_cells in lines:
        left = heading in ("worker", "")
        table.add_column(heading, no_wrap=True, overflow="crop", justify="left" if left else "right")
    for row, one in enumerate(ordered, 1):
        mark = Text(glyphs.chosen, MEASURED) if one.chosen else ""
        table.add_row(mark, *(line[row] for line in lines), style="" if one.chosen else QUIET)
    return table


def _fitting(ordered: list[CandidateRecord], notes: list[str], columns: int) -> tuple[list[list[str]], int]:
    """The table's columns, each with its heading first, and the gap between them. Optional columns are dropped until
    the rest fits.
    """
    shown = [column for column in COLUMNS if any(explanation.counts(one, column[1]) for one in ordered)]
    lines: list[list[str]] = []
    for dropped, name_columns, gap in (
        (None, NAME_COLUMNS_MAX, 2),
        (None, NAME_COLUMNS_MAX, 1),
        *((name, NAME_COLUMNS_NARROW, 1) for name in (None, *LEFT_OUT)),
    ):
        shown = [column for column in shown if column[1] != dropped]
        lines = [
            ["worker", *(shortened(one.worker_id, name_columns) for one in ordered)],
            *([heading, *(_cell(one, name) for one in ordered)] for heading, name in shown),
            ["cost", *(duration(one.cost_s) for one in ordered)],
            ["", *notes],
        ]
        if 1 + sum(gap + max(map(len, line)) for line in lines) <= columns:
            return lines, gap
    return lines, 1


def shortened(name: str, columns: int) -> str:
    """Cut at the beginning, because names differ at their ends."""
    return name if len(name) <= columns else f"..{name[2 - columns :]}"


def _cell(candidate: CandidateRecord, name: str) -> str:
    value = getattr(candidate, name)
    return counted(value) if isinstance(value, int) else _duration_or_dash(explanation.counts(candidate, name))


def _duration_or_dash(seconds: float) -> str:
    return duration(seconds) if seconds else "-"
