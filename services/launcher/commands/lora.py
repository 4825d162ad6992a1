"""``baton lora``: load and unload LoRA adapters on the workers of the running system."""

from __future__ import annotations

import getpass
import socket
import sys
from typing import Annotated

import typer
from rich.console import Console

from services.launcher.commands.options import Json, NatsUrl, StateDir, fail, find_nats, print_json, reply_of, show
from services.launcher.commands.orders import checked
from services.launcher.views.adapters import draw_adapters, result_lines
from shared.contracts.adapters import AdapterAction, OrderAdapter
from shared.contracts.message import in_full

lora = typer.Typer(no_args_is_help=True, help="Load, unload and list LoRA adapters.")

Name = Annotated[str, typer.Argument(help="The name by which requests ask for it, as their model.")]
Workers = Annotated[
    list[str] | None,
    typer.Option("--worker", help="Only this worker; repeatable.", show_default="all of the model, also later ones"),
]
Model = Annotated[str, typer.Option(help="The model that it adapts.", show_default="the only one")]


def add_to(app: typer.Typer) -> None:
    """Add the group of commands."""
    app.add_typer(lora, name="lora", rich_help_panel="Operate it")


@lora.command(
    epilog="""[bold]Example[/]

[cyan]WORKER_LORA_DIR=/adapters baton up[/]   workers accept adapters in this folder

[cyan]baton lora load sql sql-v2[/]   loads /adapters/sql-v2; requests name it with "model": "sql"

Loading other files under the same name replaces the adapter; running requests finish with the old one.
Workers that start later load it, too."""
)
def load(  # one parameter per option is how the command line is declared
    name: Name,
    path: Annotated[str, typer.Argument(help="A folder, relative to the workers' WORKER_LORA_DIR.")],
    worker: Workers = None,
    model: Model = "",
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Load an adapter on workers, or replace the one of this name."""
    give(AdapterAction.LOAD, name, path, model, worker, find_nats(nats_url, state_dir), json=json)


@lora.command()
def unload(
    name: Name,
    worker: Workers = None,
    model: Model = "",
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Unload an adapter. Running requests finish; further ones get 404."""
    give(AdapterAction.UNLOAD, name, "", model, worker, find_nats(nats_url, state_dir), json=json)


@lora.command(name="list")
def list_adapters(nats_url: NatsUrl = "", state_dir: StateDir = None, json: Json = False) -> None:
    """List the adapters that workers have loaded, and the newest orders with who gave them."""
    from services.launcher import bus_client

    url = find_nats(nats_url, state_dir)
    found = reply_of(bus_client.read_adapters(url), url)
    if json:
        loaded = {one.record.worker_id: in_full(one.record.adapters) for one in found.fleet.state.workers}
        print_json({"loaded": loaded, **in_full(found.adapters)})
        return
    show(found, draw_adapters, json=False, wide=True)


def operator() -> str:
    """The user of this command, for the orchestrator's log."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no entry in the user database
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def give(
    action: AdapterAction, name: str, path: str, model: str, workers: list[str] | None, url: str, *, json: bool
) -> None:
    """Give the order and show its result; exits with 1 if a worker failed."""
    from services.launcher import bus_client

    ids = [checked(worker) for worker in workers or ()]
    order = OrderAdapter(action=action, name=name, path=path, model=model, workers=ids, by=operator())
    console = Console()
    with console.status(f"{action.value} {name}"):
        result = reply_of(bus_client.order_adapter(url, order), url)
    if json:
        print_json(in_full(result))
    elif result.refusal:
        fail(f"The order was refused: {result.refusal}.")
    else:
        for line in result_lines(result):
            console.print(line, highlight=False, soft_wrap=True)
    if result.refusal or any(change.failure for change in result.changes):
        sys.exit(1)
