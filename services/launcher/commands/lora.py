"""``baton lora``: load and unload LoRA adapters on the workers of the running system."""

from __future__ import annotations

import getpass
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from services.launcher.bus_client import AdapterView
from services.launcher.commands.options import Json, NatsUrl, StateDir, fail, find_nats, print_json, reply_of, show
from services.launcher.commands.orders import checked
from services.launcher.terminal import Console
from shared.contracts.fleet_orders import AdapterAction, AdapterOrdered, OrderAdapter, WantedAdapter
from shared.contracts.message import in_full
from shared.contracts.workers import LoraAdapter

lora = typer.Typer(no_args_is_help=True, help="Load, unload and list LoRA adapters.")

Name = Annotated[str, typer.Argument(help="The name by which requests ask for it, as their model.")]
Workers = Annotated[
    list[str] | None,
    typer.Option("--worker", help="Only this worker; repeatable.", show_default="all of the model, also later ones"),
]
Model = Annotated[str, typer.Option(help="The model that it adapts.", show_default="the only one")]
DIGEST_CHARS = 12
ORDERS_SHOWN = 10


def add_to(app: typer.Typer) -> None:
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
    give(AdapterAction.LOAD, name, path, model, worker, nats_url, state_dir, json=json)


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
    give(AdapterAction.UNLOAD, name, "", model, worker, nats_url, state_dir, json=json)


@lora.command(name="list")
def list_adapters(nats_url: NatsUrl = "", state_dir: StateDir = None, json: Json = False) -> None:
    """List the adapters that workers have loaded, and the newest orders with their givers."""
    from services.launcher import bus_client

    url = find_nats(nats_url, state_dir)
    found = reply_of(bus_client.read_adapters(url), url, state_dir)
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


def give(  # noqa: PLR0913  # the options of the commands
    action: AdapterAction,
    name: str,
    path: str,
    model: str,
    workers: list[str] | None,
    nats_url: str,
    state_dir: Path | None,
    *,
    json: bool,
) -> None:
    """Give the order and show its result; exits with 1 if a worker failed."""
    from services.launcher import bus_client

    ids = [checked(worker) for worker in workers or ()]
    order = OrderAdapter(action=action, name=name, path=path, model=model, workers=ids, by=operator())
    console, url = Console(), find_nats(nats_url, state_dir)
    with console.status(f"{action.value} {name}"):
        result = reply_of(bus_client.order_adapter(url, order), url, state_dir)
    if json:
        print_json(in_full(result))
    elif result.refusal:
        fail(f"The order was refused: {result.refusal}.")
    else:
        for line in result_lines(result):
            console.print(line, highlight=False, soft_wrap=True)
    if result.refusal or any(change.failure for change in result.changes):
        sys.exit(1)


def result_lines(result: AdapterOrdered) -> Iterator[str]:
    """One line for each worker, as markup."""
    name = escape(result.order.name)
    if not result.changes:
        yield f"[green]✓[/] No worker had loaded {name}."
    for change in result.changes:
        worker = escape(change.worker_id)
        if change.failure:
            yield f"[bold red]✗[/] {worker}: {escape(change.failure)}"
        elif result.order.action is AdapterAction.LOAD:
            yield f"[green]✓[/] {worker} serves {name} ({change.digest[:DIGEST_CHARS]}), {change.seconds:.1f} s"
        else:
            yield f"[green]✓[/] {worker} no longer serves {name}"


def draw_adapters(view: AdapterView, console: Console) -> None:
    """What is loaded where, and the newest orders."""
    console.print(loaded_table(view))
    if view.adapters.orders:
        console.print()
    for done in view.adapters.orders[:ORDERS_SHOWN]:
        console.print(Text(order_line(done), "dim"), soft_wrap=True)


def loaded_table(view: AdapterView) -> Table:
    """One line for each adapter and version of its files."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in ("adapter", "model", "files", "workers", "wanted"):
        table.add_column(heading, overflow="fold")
    holders: dict[tuple[str, str, str], list[str]] = {}
    for worker in view.fleet.state.workers:
        for adapter in worker.record.adapters:
            holders.setdefault(_key(worker.record.models, adapter), []).append(worker.record.worker_id)
    wanted = {(one.name, one.model): one for one in view.adapters.wanted}
    for (name, model, digest), workers in sorted(holders.items()):
        order = wanted.pop((name, model), None)
        table.add_row(name, model, digest[:DIGEST_CHARS], ", ".join(sorted(workers)), _where(order))
    for (name, model), order in sorted(wanted.items()):
        table.add_row(name, model, "", "none", _where(order))
    return table


def order_line(done: AdapterOrdered) -> str:
    """An order with its time, its giver and its result."""
    at = datetime.fromtimestamp(done.at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    failed = [change.worker_id for change in done.changes if change.failure]
    result = done.refusal or f"{len(done.changes) - len(failed)} of {len(done.changes)} workers"
    again = " (again)" if done.automatic else ""
    path = f" {done.order.path}" if done.order.path else ""
    return f"{at} {done.order.by or 'unknown'}{again}: {done.order.action.value} {done.order.name}{path}: {result}"


def _key(models: list[str], adapter: LoraAdapter) -> tuple[str, str, str]:
    return adapter.name, models[0] if models else "", adapter.digest


def _where(order: WantedAdapter | None) -> str:
    """On which workers the operator wants it; empty: it comes from a worker's settings."""
    return "" if order is None else ", ".join(order.workers) or "all"
