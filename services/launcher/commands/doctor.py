"""``baton doctor``: checks the installation, this machine and the running system."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from itertools import groupby
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from services.launcher.commands.options import (
    Json,
    NatsUrl,
    StateDir,
    common_settings,
    find_nats,
    print_json,
    state_folder,
    wide_console,
)
from services.launcher.doctor.findings import Examination, Finding, Level
from services.launcher.fleet.joining import stored_names
from services.launcher.system import state_file
from services.launcher.terminal import Console

NATS_VARIABLE = "BATON_NATS_URL"
MARKS = {Level.OK: "✓", Level.NOTE: "·", Level.WARNING: "!", Level.ERROR: "✗"}
LETTERS = {Level.OK: "ok", Level.NOTE: "--", Level.WARNING: "!!", Level.ERROR: "NO"}
"""Marks for terminals that show only ASCII."""
STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}
BAD = frozenset({Level.WARNING, Level.ERROR})
WIDTH_MAX = 110
"""Lines that are longer than this are hard to read."""
EPILOG = """[bold]Examples[/]

[cyan]baton doctor[/]   this installation, this machine, and the running system

[cyan]baton doctor --quick[/]   the same without loading vLLM and NIXL, which takes seconds

[cyan]baton doctor --nats-url nats://gpu-host:4222 --json[/]   another system, as JSON

[bold]Marks[/]

✓ works   · note   ! works with a problem   ✗ does not work   → what to do

The last line says healthy, degraded (warnings) or unhealthy (errors). The exit status is 1 when unhealthy."""


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Observe it", epilog=EPILOG)(doctor)


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Skip loading vLLM and NIXL.")] = False,
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Check installation, machine and running system; report each problem with its cause and remedy."""
    from services.launcher.doctor.doctor import Scope, examine

    url = find_nats(nats_url, state_dir)  # Before settings are read: it may select the keys to use.
    folder = state_folder(state_dir)
    common = msgspec.structs.replace(common_settings(), state_dir=str(folder))
    running = state_file.find(folder)
    scope = Scope(
        common=common,
        nats_url=url,
        is_expected=bool(nats_url or running or os.environ.get(NATS_VARIABLE)),
        launcher_pid=running.pid if running and nats_url in {"", running.nats_url} else 0,
        load_engine=not quick,
        joined=stored_names(folder),
    )
    with Console(stderr=True).status("Checking the installation and listening to the system"):
        report = asyncio.run(examine(scope))
    if json:
        print_json(report)
    else:
        draw(report, wide_console())
    sys.exit(1 if report.errors else 0)


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
