"""``baton doctor``: checks the installation, this machine and the running system."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from services.launcher.commands.options import (
    WIDTH_OF_FILES,
    Json,
    NatsUrl,
    StateDir,
    common_settings,
    find_nats,
    print_json,
)
from services.launcher.system import state_file

NATS_VARIABLE = "BATON_NATS_URL"


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        rich_help_panel="Observe it",
        epilog="""[bold]Examples[/]

[cyan]baton doctor[/]   this installation, this machine, and the running system

[cyan]baton doctor --quick[/]   the same without loading vLLM and NIXL, which takes seconds

[cyan]baton doctor --nats-url nats://gpu-host:4222 --json[/]   another system, as JSON

[bold]Marks[/]

✓ works   · note   ! works with a problem   ✗ does not work   → what to do

The last line says healthy, degraded (warnings) or unhealthy (errors). The exit status is 1 when unhealthy.""",
    )(doctor)


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Skip loading vLLM and NIXL.")] = False,
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Check installation, machine and running system; report each problem with its cause and remedy."""
    from services.launcher.doctor.doctor import Scope, examine
    from services.launcher.doctor.picture import draw

    url = find_nats(nats_url, state_dir)  # Before settings are read: it may select the keys to use.
    common = common_settings()
    if state_dir is not None:
        common = msgspec.structs.replace(common, state_dir=str(state_dir))
    running = state_file.find(Path(common.state_dir))
    scope = Scope(
        common=common,
        nats_url=url,
        is_expected=bool(nats_url or running or os.environ.get(NATS_VARIABLE)),
        launcher_pid=running.pid if running and nats_url in {"", running.nats_url} else 0,
        load_engine=not quick,
    )
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH_OF_FILES)
    with Console(stderr=True).status("Checking the installation and listening to the system"):
        report = asyncio.run(examine(scope))
    if json:
        print_json(report)
    else:
        draw(report, console)
    sys.exit(1 if report.errors else 0)
