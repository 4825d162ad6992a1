"""`baton explain`: a decision as a picture. Everything is legible without colour, in 80 columns, and in a pipe."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shared.contracts.decisions import CandidateRecord, DecisionRecord, Part
from shared.text import explanation as words
from shared.text.quantities import counted, duration

PREDICTED, MEASURED = "cyan", "green"
MISSED, QUIET = "bold red", "dim"
LEFT_COLUMNS = 36
"""Of the waterfall: names and numbers, before the bars."""
BAR_COLUMNS_MIN, BAR_COLUMNS_MAX = 20, 80
HEADINGS = {
    Part.PREFILL: "Who could compute the prompt",
    Part.DECODE: "Who could answer",
    Part.WHOLE: "Who could do both",
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
"""Of the candidates; one in which all have nothing is left out. All seconds add up to the cost."""
LEFT_OUT = ("computed_tokens", "fetch_s", "handoff_s", "fetched_tokens", "others_s")
"""Where there is no room for all, these go first; the cost has everything."""
NAME_COLUMNS_MAX = 24
NAME_COLUMNS_NARROW = 14


@dataclass(frozen=True)
class Glyphs:
    """What bars are made of."""

    predicted: str
    measured: str
    both: str
    sliver: str
    """Something, but less than a column."""
    chosen: str
    both_style: str = ""


COLOURED = Glyphs("▀", "▄", "▀", "▏", "●", f"{PREDICTED} on {MEASURED}")
BLOCKS = Glyphs("▀", "▄", "█", "▏", "●")
LETTERS = Glyphs("^", "_", "#", "|", "*")
"""Where only ASCII gets through."""


def draw(told: DecisionRecord, console: Console) -> None:
    """All of it."""
    has_colour = console.color_system is not None and not console.no_color
    glyphs = LETTERS if console.options.ascii_only else COLOURED if has_colour else BLOCKS
    for section in _sections(words.printable(told), console.width, glyphs):
        console.print(section, highlight=False)


def _sections(told: DecisionRecord, columns: int, glyphs: Glyphs) -> Iterator[RenderableType]:
    yield Text(words.headline(told), "bold")
    why = words.because(told)
    for sentence in why:
        yield Text(sentence)
    yield Text("")
    yield _facts(told)
    if told.predicted.total_s() or told.measured is not None:
        yield Text("")
        yield Text.assemble(("Time to first token", "bold"), f": {words.ttft_text(told)}")
        yield Padding(_waterfall(told, columns, glyphs), (0, 0, 0, 2))
    for part in Part:
        candidates = [one for one in told.candidates if one.part is part]
        if candidates:
            yield Text("")
            yield Text(_heading(told, part, len(candidates)), "bold")
            yield Padding(_candidates(candidates, columns - 2, glyphs), (0, 0, 0, 2))
    if regret := words.regret_text(told):
        yield Text("")
        yield Text(regret, MISSED if told.regret_s > 0 else "")


def _facts(told: DecisionRecord) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style=QUIET, no_wrap=True)
    table.add_column()
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(told.at_unix_s))
    table.add_row("decision", Text(f"{told.decision_id}   {when}", overflow="fold"))
    table.add_row("model", Text(told.model or "any", overflow="fold"))
    if told.mode:
        table.add_row("mode", f"{told.mode}: {told.reason}")
        table.add_row("prompt", words.cached_text(told))
    for source in told.sources:
        table.add_row("KV from", f"{source.worker_id}, {_blocks(source.first, source.end)}")
    if told.attempt > 1:
        table.add_row("attempt", f"{told.attempt}; the one before: baton explain {told.earlier}")
    if told.tenant or told.priority:
        table.add_row("tenant", f"{told.tenant or 'nobody'}, priority {told.priority}")
    for sentence in words.target_text(told):
        table.add_row("target", Text(sentence, MISSED if "missed" in sentence else ""))
    if any(one.within_s for one in told.candidates):
        table.add_row("", "what is generated within the ITL target costs nothing")
    if told.itl_s >= 0 or told.predicted_itl_s > 0:
        table.add_row("ITL", _itl(told))
    return table


def _blocks(first: int, end: int) -> str:
    if end:
        return f"blocks {counted(first)} to {counted(end)}"
    return f"from block {counted(first)} on" if first else "as much as it has"


def _itl(told: DecisionRecord) -> str:
    said = [f"{duration(told.predicted_itl_s)} predicted"] if told.predicted_itl_s > 0 else []
    return ", ".join([*said, f"{duration(told.itl_s)} measured"] if told.itl_s >= 0 else said)


def _waterfall(told: DecisionRecord, columns: int, glyphs: Glyphs) -> Table:
    """A line for each part, each bar beginning where the one before ends."""
    predicted, measured = told.predicted, told.measured
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
    for name, label in words.PART_NAMES.items():
        parts_s = [getattr(predicted, name), getattr(measured, name) if measured is not None else 0.0]
        if not any(parts_s):
            continue
        spans = [_span(begin_s, part_s, whole_s, wide) for begin_s, part_s in zip(before, parts_s, strict=True)]
        cells = [_duration_or_dash(part_s) for part_s in parts_s]
        table.add_row(label, cells[0], cells[1] if measured is not None else "", _bar(spans, wide, glyphs))
        before = [begin_s + part_s for begin_s, part_s in zip(before, parts_s, strict=True)]
    total = [duration(predicted.total_s()), duration(measured.total_s()) if measured is not None else ""]
    table.add_row(Text("in all", "bold"), *(Text(one, "bold") for one in total), _legend(told, glyphs))
    return table


def _span(begin_s: float, part_s: float, whole_s: float, wide: int) -> tuple[int, int]:
    """First column and the one behind the last; something that is less than a column has none."""
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


def _legend(told: DecisionRecord, glyphs: Glyphs) -> Text:
    if told.measured is None:
        return Text.assemble((glyphs.predicted, PREDICTED), (" predicted", QUIET))
    return Text.assemble(
        (glyphs.predicted, PREDICTED),
        (" predicted  ", QUIET),
        (glyphs.measured, MEASURED),
        (" measured  ", QUIET),
        (glyphs.both, glyphs.both_style),
        (" both", QUIET),
    )


def _heading(told: DecisionRecord, part: Part, shown: int) -> str:
    of = f" ({shown} of {counted(told.considered)} workers)" if told.considered > shown else ""
    return f"{HEADINGS[part]}{of}"


def _candidates(candidates: list[CandidateRecord], columns: int, glyphs: Glyphs) -> Table:
    """Chosen first, then by cost; as many columns as fit."""
    chosen = next((one for one in candidates if one.chosen), None)
    ordered = sorted(candidates, key=lambda one: (not one.chosen, one.cost_s))
    lines, gap = _fitting(ordered, [words.why_not(one, chosen) for one in ordered], columns)
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style=QUIET)
    table.add_column("", width=1)
    for heading, *_cells in lines:
        left = heading in ("worker", "")
        table.add_column(heading, no_wrap=True, overflow="crop", justify="left" if left else "right")
    for row, one in enumerate(ordered, 1):
        mark = Text(glyphs.chosen, MEASURED) if one.chosen else ""
        table.add_row(mark, *(line[row] for line in lines), style="" if one.chosen else QUIET)
    return table


def _fitting(ordered: list[CandidateRecord], verdicts: list[str], columns: int) -> tuple[list[list[str]], int]:
    """The table's columns, each with its heading first, and the gap between them: what may be left out goes until all
    others fit.
    """
    shown = [column for column in COLUMNS if any(words.counts(one, column[1]) for one in ordered)]
    lines: list[list[str]] = []
    for dropped, name_columns, gap in (
        (None, NAME_COLUMNS_MAX, 2),
        (None, NAME_COLUMNS_MAX, 1),
        *((name, NAME_COLUMNS_NARROW, 1) for name in (None, *LEFT_OUT)),
    ):
        shown = [column for column in shown if column[1] != dropped]
        lines = [
            ["worker", *(_shortened(one.worker_id, name_columns) for one in ordered)],
            *([heading, *(_cell(one, name) for one in ordered)] for heading, name in shown),
            ["cost", *(duration(one.cost_s) for one in ordered)],
            ["", *verdicts],
        ]
        if 1 + sum(gap + max(map(len, line)) for line in lines) <= columns:
            return lines, gap
    return lines, 1


def _shortened(name: str, columns: int) -> str:
    """Names differ at their ends."""
    return name if len(name) <= columns else f"..{name[2 - columns :]}"


def _cell(candidate: CandidateRecord, name: str) -> str:
    value = getattr(candidate, name)
    return counted(value) if isinstance(value, int) else _duration_or_dash(words.counts(candidate, name))


def _duration_or_dash(seconds: float) -> str:
    return duration(seconds) if seconds else "-"
