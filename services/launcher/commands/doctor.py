"""``baton doctor``: is everything here that Baton needs, and is the running system well?"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from services.launcher.commands.options import WIDTH_OF_FILES, NatsUrl, StateDir, common_settings, find_nats
from services.launcher.system import state_file

NATS_VARIABLE = "BATON_NATS_URL"


def add_to(app: typer.Typer) -> None:
    """The command."""
    app.command(
        epilog="""[bold]Examples[/]

[cyan]baton doctor[/]   this installation, this machine, and the system that runs here

[cyan]baton doctor --quick[/]   the same without loading vLLM and NIXL, which takes seconds

[cyan]baton doctor --nats-url nats://gpu-host:4222 --json[/]   another system, for programs

✓ is well, · is worth knowing, ! works but wants looking after, ✗ does not work; → says what to do.
The exit status is 1 if anything does not work, otherwise 0."""
    )(doctor)


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Do not load vLLM and NIXL.")] = False,
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Check the installation and the running system, and say in words what is wrong and what to do about it."""
    from services.launcher.doctor.doctor import Patient, examine
    from services.launcher.doctor.picture import draw

    url = find_nats(nats_url, state_dir)  # before settings are read: it may find the keys to use
    common = common_settings()
    if state_dir is not None:
        common = msgspec.structs.replace(common, state_dir=str(state_dir))
    running = state_file.find(Path(common.state_dir))
    patient = Patient(
        common=common,
        nats_url=url,
        is_expected=bool(nats_url or running or os.environ.get(NATS_VARIABLE)),
        launcher_pid=running.pid if running and nats_url in {"", running.nats_url} else 0,
        load_engine=not quick,
    )
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH_OF_FILES)
    with Console(stderr=True).status("Looking at the installation and listening to the system"):
        told = asyncio.run(examine(patient))
    if json:
        print(msgspec.json.format(msgspec.json.encode(told)).decode())
    else:
        draw(told, console)
    sys.exit(1 if told.errors else 0)
