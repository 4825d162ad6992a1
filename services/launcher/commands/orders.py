"""``baton drain`` and ``baton role``: orders to one worker of the running system."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from services.launcher.commands.options import NatsUrl, StateDir, fail, find_nats, no_nats
from shared.bus.port import BusError
from shared.contracts.fleet_orders import ChangeRole, DrainWorker, RoleChanged, WorkerDrained
from shared.contracts.ids import WorkerId, is_subject_token
from shared.contracts.workers import Role
from shared.text import fleet_text


class NewRole(StrEnum):
    """What a worker with an engine may be."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


Worker = Annotated[str, typer.Argument(help="Its id, as `baton workers` lists it.")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]


def add_to(app: typer.Typer) -> None:
    """Both commands."""
    app.command(
        epilog="[bold]Example[/]\n\n[cyan]baton drain decode-2 --deadline 60[/]   streams have a minute to end"
    )(drain)
    app.command(epilog="[bold]Example[/]\n\n[cyan]baton role prefill-1 decode[/]   more of the fleet writes answers")(
        role
    )


def drain(
    worker: Worker,
    deadline: Annotated[
        float | None,
        typer.Option(min=0.0, help="Seconds for running legs; then they go on elsewhere.", show_default="the worker's"),
    ] = None,
    evacuate: Annotated[
        bool, typer.Option("--evacuate/--keep-cache", help="Whether its hot prefixes go to those that stay.")
    ] = True,
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Take a worker out of the fleet: nothing new, what runs may finish, its cache is moved, it leaves."""
    from services.launcher.commands.worker_orders import NotObeyed
    from services.launcher.commands.worker_orders import drain as have_drained

    order = DrainWorker(worker_id=checked(worker), deadline_s=deadline, evacuate=evacuate)
    console, url = Console(), find_nats(nats_url, state_dir)
    with console.status(fleet_text.draining(worker, None, evacuate=evacuate)) as status:

        def on_legs(legs: int) -> None:
            status.update(fleet_text.draining(worker, legs, evacuate=evacuate))

        try:
            told = asyncio.run(have_drained(url, order, on_legs))
        except NotObeyed as error:
            fail(str(error))
        except BusError as error:
            no_nats(url, error)
    say(console, told, fleet_text.drained(told), json=json)


def role(
    worker: Worker,
    role: Annotated[NewRole, typer.Argument(help="What it is from now on.")],
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Change what a worker is placed for, without a restart: verified first, and nothing that runs is disturbed."""
    from services.launcher.commands.worker_orders import NotObeyed, change_role

    order = ChangeRole(worker_id=checked(worker), role=Role(role.value))
    console, url = Console(), find_nats(nats_url, state_dir)
    with console.status(f"{worker} proves that it can be a {role.value} worker"):
        try:
            told = asyncio.run(change_role(url, order))
        except NotObeyed as error:
            fail(str(error))
        except BusError as error:
            no_nats(url, error)
    say(console, told, fleet_text.role_changed(told), json=json)


def checked(worker: str) -> WorkerId:
    """An id that can be addressed."""
    if not is_subject_token(worker):
        fail(f"{worker!r} is no worker's id: those have letters, digits, '-' and '_' only.")
    return WorkerId(worker)


def say(console: Console, told: WorkerDrained | RoleChanged, words: str, *, json: bool) -> None:
    """How it ended."""
    if json:
        print(msgspec.json.format(msgspec.json.encode(told)).decode())
    else:
        console.print(f"[green]✓[/] {words}", highlight=False, soft_wrap=True)
