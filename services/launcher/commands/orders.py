"""``baton drain`` and ``baton role``: orders to one worker; ``baton sleep`` and ``baton wake``: to those of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.launcher.commands.options import (
    EngineRole,
    Json,
    NatsUrl,
    StateDir,
    fail,
    find_nats,
    print_json,
    reply_of,
)
from services.launcher.terminal import Console
from shared.contracts.fleet_orders import ChangeRole, DrainWorker, ModelOrdered, OrderModel, RoleChanged, WorkerDrained
from shared.contracts.ids import WorkerId, is_subject_token
from shared.contracts.workers import Role
from shared.text import fleet_text

OPERATE = "Operate it"

Worker = Annotated[str, typer.Argument(help="A worker id, as `baton workers` lists it.")]

Model = Annotated[str, typer.Argument(help="A model, by the name that `baton workers` shows.")]


def add_to(app: typer.Typer) -> None:
    app.command(
        rich_help_panel=OPERATE,
        epilog="[bold]Example[/]\n\n[cyan]baton drain decode-2 --deadline 60[/]   running streams have a minute to end",
    )(drain)
    app.command(
        rich_help_panel=OPERATE,
        epilog="[bold]Example[/]\n\n[cyan]baton role prefill-1 decode[/]   turns a prefill worker into a decode worker",
    )(role)
    app.command(rich_help_panel=OPERATE)(sleep)
    app.command(rich_help_panel=OPERATE)(wake)


def drain(
    worker: Worker,
    deadline: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Seconds for running requests; then other workers continue them.", show_default="the worker's"
        ),
    ] = None,
    evacuate: Annotated[
        bool, typer.Option("--evacuate/--keep-cache", help="Copy its hot prefixes to other workers.")
    ] = True,
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Remove a worker: it accepts no new requests, finishes the running ones, copies its cache, and stops."""
    from services.launcher import bus_client

    order = DrainWorker(worker_id=checked(worker), deadline_s=deadline, evacuate=evacuate)
    console, url = Console(), find_nats(nats_url, state_dir)
    with console.status(fleet_text.draining(worker, None, evacuate=evacuate)) as status:

        def on_legs(legs: int) -> None:
            status.update(fleet_text.draining(worker, legs, evacuate=evacuate))

        result = reply_of(bus_client.drain(url, order, on_legs), url, state_dir)
    show_result(console, result, fleet_text.drained(result), json=json)


def role(
    worker: Worker,
    role: Annotated[EngineRole, typer.Argument(help="The new role.")],
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Change a worker's role without a restart. The worker verifies the role first; running requests continue."""
    from services.launcher import bus_client

    order = ChangeRole(worker_id=checked(worker), role=Role(role.value))
    console, url = Console(), find_nats(nats_url, state_dir)
    with console.status(f"{worker} verifies that it can be a {role.value} worker"):
        result = reply_of(bus_client.change_role(url, order), url, state_dir)
    show_result(console, result, fleet_text.role_changed(result), json=json)


def sleep(model: Model, nats_url: NatsUrl = "", state_dir: StateDir = None, json: Json = False) -> None:
    """Put a model to sleep: its workers end their engines and free their memory. A request wakes it."""
    order_model(model, nats_url, state_dir, asleep=True, json=json)


def wake(model: Model, nats_url: NatsUrl = "", state_dir: StateDir = None, json: Json = False) -> None:
    """Wake a model that sleeps: its workers start their engines."""
    order_model(model, nats_url, state_dir, asleep=False, json=json)


def order_model(model: str, nats_url: str, state_dir: Path | None, *, asleep: bool, json: bool) -> None:
    """Give the order and show the answer."""
    from services.launcher import bus_client

    url = find_nats(nats_url, state_dir)
    result = reply_of(bus_client.order_model(url, OrderModel(model=model, asleep=asleep)), url, state_dir)
    show_result(Console(), result, fleet_text.model_ordered(model, result, asleep=asleep), json=json)


def checked(worker: str) -> WorkerId:
    """The id, if it can be part of a NATS subject; otherwise exits."""
    if not is_subject_token(worker):
        fail(f"{worker!r} is not a worker id: those consist of letters, digits, '-' and '_'.")
    return WorkerId(worker)


def show_result(console: Console, result: WorkerDrained | RoleChanged | ModelOrdered, text: str, *, json: bool) -> None:
    """As JSON or as a sentence."""
    if json:
        print_json(result)
    else:
        console.print(f"[green]✓[/] {text}", highlight=False, soft_wrap=True)
