"""``baton plan``: what the planner thinks of the running system's fleet."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from services.launcher.commands.options import WIDTH_OF_FILES, NatsUrl, StateDir, fail, find_nats, no_nats
from shared.bus.port import BusError
from shared.contracts.message import in_full


def add_to(app: typer.Typer) -> None:
    """The command."""
    app.command(
        epilog="""[bold]Examples[/]

[cyan]baton plan[/]   of the system that runs here

[cyan]ORCHESTRATOR_PLANNER=act baton up --prefill 2 --decode 2[/]   workers change their roles with the traffic

[cyan]baton up --workers-max 4[/]   and are started and drained

ORCHESTRATOR_PLANNER_TTFT_S and ORCHESTRATOR_PLANNER_ITL_S are the targets; ORCHESTRATOR_SCALER=webhook with
ORCHESTRATOR_SCALER_URL asks whoever runs your machines for workers."""
    )(plan)


def plan(
    count: Annotated[int, typer.Option(min=1, help="Decisions to show, the newest.")] = 20,
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show how many workers of which role the traffic wants, and what the planner did about it, and why."""
    from services.launcher.views.fleet_plan import NoPlan, ask_plans, draw

    url = find_nats(nats_url, state_dir)
    try:
        told = asyncio.run(ask_plans(url, count))
    except NoPlan as error:
        fail(str(error))
    except BusError as error:
        no_nats(url, error)
    if json:
        print(msgspec.json.format(msgspec.json.encode(in_full(told))).decode())
        return
    console = Console()
    draw(told, console if console.is_terminal else Console(width=WIDTH_OF_FILES))
