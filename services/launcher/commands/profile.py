"""``baton profile``: profile the engines of the running system, several at once."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from services.launcher.commands.options import EngineRole, Json, NatsUrl, StateDir, find_nats, print_json, reply_of
from services.launcher.commands.orders import checked
from services.launcher.profiles import Chosen, Collected
from services.launcher.terminal import Console
from shared.contracts.profiling import PROFILE_S_MAX, PROFILE_STEPS_MAX
from shared.contracts.workers import Role

profile = typer.Typer(no_args_is_help=True, help="Profile engines: what each did in every step, for several at once.")

Workers = Annotated[
    list[str] | None, typer.Argument(help="Workers, as `baton workers` lists them.", show_default="all that serve")
]
OfRole = Annotated[EngineRole | None, typer.Option("--role", help="Only workers of this role.")]
OfModel = Annotated[str, typer.Option("--model", help="Only workers of this model.")]


def add_to(app: typer.Typer) -> None:
    app.add_typer(profile, name="profile", rich_help_panel="Operate it")


@profile.command(
    epilog="""[bold]Example[/]

[cyan]baton profile start prefill-1 decode-1 --seconds 5[/]   records what both engines do in the next five seconds

[cyan]baton profile stop[/]   writes the traces to ./profile-DATE-TIME, to be opened at https://ui.perfetto.dev

Engines are slower while they are profiled, and stand still while they write their traces."""
)
def start(  # noqa: PLR0913, PLR0917  # one parameter per option is how the command line is declared
    workers: Workers = None,
    role: OfRole = None,
    model: OfModel = "",
    seconds: Annotated[float, typer.Option(min=0.1, max=PROFILE_S_MAX, help="Workers stop by themselves then.")] = 10.0,
    steps: Annotated[
        int, typer.Option(min=1, max=PROFILE_STEPS_MAX, help="Steps of an engine after which it records no more.")
    ] = 200,
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Start the engines' profilers."""
    from services.launcher import profiles

    url, profile_id = find_nats(nats_url, state_dir), time.strftime("profile-%Y%m%d-%H%M%S", time.gmtime())
    console = Console()
    with console.status("starting the profilers"):
        begun = reply_of(profiles.start(url, chosen(workers, role, model), profile_id, seconds, steps), url, state_dir)
    if json:
        print_json(begun)
    else:
        for worker, why in sorted(begun.refused.items()):
            console.print(f"[bold red]✗[/] {escape(worker)}: {escape(why)}", highlight=False, soft_wrap=True)
        if begun.workers:
            names = ", ".join(sorted(begun.workers))
            text = f"{profile_id} runs on {escape(names)} for {seconds:g} s or {steps} steps"
            console.print(f"[green]✓[/] {text}; then: baton profile stop", highlight=False, soft_wrap=True)
    if not begun.workers:
        sys.exit(1)


@profile.command()
def stop(
    workers: Workers = None,
    role: OfRole = None,
    model: OfModel = "",
    to: Annotated[Path, typer.Option(help="Folder in which the profile's folder is made.")] = Path(),
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Stop the profilers that still run, and copy the traces of all workers into one folder."""
    from services.launcher import profiles

    url, console = find_nats(nats_url, state_dir), Console()
    with console.status("the engines write their traces"):
        collected = reply_of(profiles.stop(url, chosen(workers, role, model), to), url, state_dir)
    if json:
        print_json(collected)
        return
    for one in collected:
        show_folder(console, one)


def show_folder(console: Console, one: Collected) -> None:
    for worker, note in sorted(one.notes.items()):
        console.print(f"[yellow]![/] {escape(worker)}: {escape(note)}", highlight=False, soft_wrap=True)
    files = ", ".join(one.files)
    text = f"{escape(one.folder)}: {escape(files)} ({one.requests} requests)"
    console.print(f"[green]✓[/] {text}", highlight=False, soft_wrap=True)


def chosen(workers: list[str] | None, role: EngineRole | None, model: str) -> Chosen:
    ids = [checked(worker) for worker in workers or ()]
    return Chosen(ids, None if role is None else Role(role.value), model)
