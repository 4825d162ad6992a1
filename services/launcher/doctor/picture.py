"""`baton doctor` as a picture: legible without colour, in 80 columns, and in a pipe."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console
from rich.text import Text

from services.launcher.doctor.findings import Examination, Finding, Level

MARKS = {Level.OK: "✓", Level.NOTE: "·", Level.WARNING: "!", Level.ERROR: "✗"}
LETTERS = {Level.OK: "ok", Level.NOTE: "--", Level.WARNING: "!!", Level.ERROR: "NO"}
"""Where only ASCII gets through."""
STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}
BAD = frozenset({Level.WARNING, Level.ERROR})
WIDTH_MAX = 110
"""Columns in which sentences are easily read."""


def draw(told: Examination, console: Console) -> None:
    """All of it."""
    plain = console.options.ascii_only
    for area, findings in groupby(told.findings, lambda finding: finding.area):
        console.print(Text(f"\n{area.value}", "bold"))
        for finding in findings:
            for line in _lines(finding, console, plain=plain):
                console.print(line, soft_wrap=True, highlight=False)
    level = Level.ERROR if told.errors else Level.WARNING if told.warnings else Level.OK
    words = Text(f"{(LETTERS if plain else MARKS)[level]} {told.verdict}", STYLES[level])
    console.print()
    for line in words.wrap(console, _width(console)):
        line.rstrip()
        console.print(line, highlight=False)


def _lines(finding: Finding, console: Console, *, plain: bool) -> Iterator[Text]:
    """Behind the mark, all lines of it begin in the same column."""
    mark = Text(f" {(LETTERS if plain else MARKS)[finding.level]} ", STYLES[finding.level])
    indent = Text(" " * mark.cell_len)
    for number, line in enumerate(_words(finding, plain=plain).wrap(console, _width(console) - mark.cell_len)):
        line.rstrip()
        yield Text.assemble(indent if number else mark, line)


def _words(finding: Finding, *, plain: bool) -> Text:
    is_bad = finding.level in BAD
    words = Text.assemble((finding.what, STYLES[finding.level] if is_bad else ""))
    if finding.why:
        words.append(f"\n{finding.why}", "" if is_bad else "dim")
    if finding.todo:
        words.append("\n-> " if plain else "\n→ ", "bold" if is_bad else "dim")
        words.append(finding.todo, "" if is_bad else "dim")
    return words


def _width(console: Console) -> int:
    return min(console.width, WIDTH_MAX)
