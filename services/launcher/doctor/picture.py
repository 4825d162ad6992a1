"""Prints the findings of `baton doctor`: legible without colour, in 80 columns, and in a pipe."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console
from rich.text import Text

from services.launcher.doctor.findings import Examination, Finding, Level

MARKS = {Level.OK: "✓", Level.NOTE: "·", Level.WARNING: "!", Level.ERROR: "✗"}
LETTERS = {Level.OK: "ok", Level.NOTE: "--", Level.WARNING: "!!", Level.ERROR: "NO"}
"""For terminals that show only ASCII."""
STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}
BAD = frozenset({Level.WARNING, Level.ERROR})
WIDTH_MAX = 110
"""Longer lines are hard to read."""


def draw(examination: Examination, console: Console) -> None:
    """Print all findings and the summary."""
    plain = console.options.ascii_only
    for area, findings in groupby(examination.findings, lambda finding: finding.area):
        console.print(Text(f"\n{area.value}", "bold"))
        for finding in findings:
            for line in _lines(finding, console, plain=plain):
                console.print(line, soft_wrap=True, highlight=False)
    level = Level.ERROR if examination.errors else Level.WARNING if examination.warnings else Level.OK
    text = Text(f"{(LETTERS if plain else MARKS)[level]} {examination.summary}", STYLES[level])
    console.print()
    for line in text.wrap(console, _width(console)):
        line.rstrip()
        console.print(line, highlight=False)


def _lines(finding: Finding, console: Console, *, plain: bool) -> Iterator[Text]:
    """All lines of a finding start in the same column, after its mark."""
    mark = Text(f" {(LETTERS if plain else MARKS)[finding.level]} ", STYLES[finding.level])
    indent = Text(" " * mark.cell_len)
    for number, line in enumerate(_text(finding, plain=plain).wrap(console, _width(console) - mark.cell_len)):
        line.rstrip()
        yield Text.assemble(indent if number else mark, line)


def _text(finding: Finding, *, plain: bool) -> Text:
    is_bad = finding.level in BAD
    text = Text.assemble((finding.what, STYLES[finding.level] if is_bad else ""))
    if finding.why:
        text.append(f"\n{finding.why}", "" if is_bad else "dim")
    if finding.todo:
        text.append("\n-> " if plain else "\n→ ", "bold" if is_bad else "dim")
        text.append(finding.todo, "" if is_bad else "dim")
    return text


def _width(console: Console) -> int:
    return min(console.width, WIDTH_MAX)
