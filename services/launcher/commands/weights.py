"""``baton weights``: change the weights of a model's workers in place, pause and resume them."""

from __future__ import annotations

import sys
from pathlib import Path, PurePath
from typing import Annotated

import typer
from rich.table import Table

from services.launcher.commands.lora import operator
from services.launcher.commands.options import Json, NatsUrl, StateDir, fail, find_nats, print_json, reply_of, show
from services.launcher.terminal import Console
from shared.contracts.fleet_orders import OrderWeights, PauseMode, Weights, WeightsAction, WeightsOrdered
from shared.contracts.message import in_full

weights = typer.Typer(no_args_is_help=True, help="Change a model's weights in place, as trainers do; pause and resume.")

Model = Annotated[str, typer.Option(help="The model whose workers are meant.", show_default="the only one")]
Mode = Annotated[PauseMode, typer.Option(help="What happens to requests that run: they end, are aborted, or are kept.")]


def add_to(app: typer.Typer) -> None:
    app.add_typer(weights, name="weights", rich_help_panel="Operate it")


@weights.command(
    epilog="""[bold]Example[/]

[cyan]WORKER_WEIGHTS_DIR=/checkpoints baton up --model /checkpoints/base[/]   workers load weights from this folder

[cyan]baton weights load step-17[/]   loads /checkpoints/step-17 on all workers of the model

The workers pause meanwhile. Cached KV of the old weights is never used afterwards. A worker that fails serves nothing
until it has the weights; one that starts later loads them before it serves."""
)
def load(  # one parameter per option is how the command line is declared
    path: Annotated[str, typer.Argument(help="A folder, relative to the workers' WORKER_WEIGHTS_DIR.")],
    version: Annotated[str, typer.Option(help="The weights' name in answers.", show_default="the folder's")] = "",
    mode: Mode = PauseMode.WAIT,
    model: Model = "",
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Load a checkpoint on all workers of a model, in place."""
    url = find_nats(nats_url, state_dir)
    order = OrderWeights(
        action=WeightsAction.LOAD, path=path, version=version or PurePath(path).name, model=model, by=operator()
    )
    was_paused = any(
        one.wanted.paused for one in _state(url, state_dir).models if not model or one.wanted.model == model
    )
    console = Console()
    with console.status(f"loading {path}"):
        if not was_paused and (paused := _ask(url, _pause(model, mode), state_dir)).refusal:
            fail(f"The order was refused: {paused.refusal}.")
        try:
            result = _ask(url, order, state_dir)
        finally:
            if not was_paused:
                _ask(url, OrderWeights(action=WeightsAction.RESUME, model=model, by=operator()), state_dir)
    _report(result, json=json)


@weights.command()
def pause(
    mode: Mode = PauseMode.WAIT,
    model: Model = "",
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Schedule nothing on the model's workers; requests that arrive wait there."""
    _report(_ask(find_nats(nats_url, state_dir), _pause(model, mode), state_dir), json=json)


@weights.command()
def resume(model: Model = "", nats_url: NatsUrl = "", state_dir: StateDir = None, json: Json = False) -> None:
    """Go on after a pause."""
    order = OrderWeights(action=WeightsAction.RESUME, model=model, by=operator())
    _report(_ask(find_nats(nats_url, state_dir), order, state_dir), json=json)


@weights.command(name="list")
def list_weights(nats_url: NatsUrl = "", state_dir: StateDir = None, json: Json = False) -> None:
    """List the weights of each model, who ordered them, and what is paused."""
    found = _state(find_nats(nats_url, state_dir), state_dir)
    if json:
        print_json(in_full(found))
    else:
        show(found, draw_weights, json=False, wide=True)


def draw_weights(found: Weights, console: Console) -> None:
    """One line for each model."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in ("model", "weights", "folder", "workers", "state", "ordered by"):
        table.add_column(heading, overflow="fold")
    for one in found.models:
        wanted = one.wanted
        state = "paused" if wanted.paused else "runs"
        table.add_row(
            wanted.model, wanted.weights or "as started", wanted.path, ", ".join(one.workers), state, wanted.by
        )
    console.print(table)


def _pause(model: str, mode: PauseMode) -> OrderWeights:
    return OrderWeights(action=WeightsAction.PAUSE, mode=mode, model=model, by=operator())


def _ask(url: str, order: OrderWeights, state_dir: Path | None) -> WeightsOrdered:
    from services.launcher import bus_client

    return reply_of(bus_client.order_weights(url, order), url, state_dir)


def _state(url: str, state_dir: Path | None) -> Weights:
    from services.launcher import bus_client

    return reply_of(bus_client.read_weights(url), url, state_dir)


def _report(result: WeightsOrdered, *, json: bool) -> None:
    """Show the result; exits with 1 if a worker failed."""
    console = Console()
    if json:
        print_json(in_full(result))
    elif result.refusal:
        fail(f"The order was refused: {result.refusal}.")
    for change in result.changes if not json else ():
        if change.failure:
            console.print(f"✗ {change.worker_id}: {change.failure}", markup=False, soft_wrap=True)
        else:
            console.print(f"✓ {change.worker_id}, {change.seconds:.1f} s", markup=False, soft_wrap=True)
    if result.refusal or any(change.failure for change in result.changes):
        sys.exit(1)
