"""``baton verdict`` and ``baton top``: what the running system does, and whether it does it the right way."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from services.launcher.commands.options import WIDTH_OF_FILES, NatsUrl, StateDir, fail, find_nats, no_nats
from shared.bus.port import BusError
from shared.contracts.message import in_full

Json = Annotated[bool, typer.Option("--json", help="For programs.")]


def add_to(app: typer.Typer) -> None:
    """Both commands."""
    app.command(
        epilog="""[bold]Examples[/]

[cyan]baton verdict[/]   all models of the system that runs here

[cyan]baton verdict --model my-model --json[/]   one model, for programs

One worker is the measure where enough requests of that length were served so, such as with the header
x-baton-mode: aggregated. Elsewhere it is estimated from how long the engines' steps take."""
    )(verdict)
    app.command(epilog="[bold]Keys[/]\n\n[cyan]q[/] ends it, [cyan]j[/] and [cyan]k[/] scroll the workers")(top)


def verdict(
    model: Annotated[str, typer.Option(help="Only this one.")] = "",
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Say whether prefill and decode apart are worth it here, by length of prompt."""
    from services.launcher.views.disaggregation_report import NoReport, ask_report, draw

    url = find_nats(nats_url, state_dir)
    try:
        told = asyncio.run(ask_report(url, model))
    except NoReport as error:
        fail(str(error))
    except BusError as error:
        no_nats(url, error)
    if json:
        print(msgspec.json.format(msgspec.json.encode(in_full(told))).decode())
    else:
        draw(told, Console())


def top(
    once: Annotated[bool, typer.Option("--once", help="Listen for a moment, show one frame, and end.")] = False,
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
) -> None:
    """Watch the system at work: workers and their load, who works for whom, requests, plans, and what happens."""
    from services.launcher.views.top import run_top

    url = find_nats(nats_url, state_dir)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH_OF_FILES)
    try:
        asyncio.run(run_top(url, console, once=once))
    except* BusError as errors:
        no_nats(url, errors.exceptions[0])
