"""``baton batch``: files of requests, served in the gaps between others."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from services.launcher.bus_client import CommandFailed
from services.launcher.commands.options import Json, StateDir, fail, print_json, router_url, show
from services.launcher.views.batch import Batch, BatchClient

batch = typer.Typer(
    no_args_is_help=True, help="Submit files of requests, follow their progress, and fetch the results."
)

Url = Annotated[str, typer.Option(help="URL of a router.", show_default="that of the system started by baton up")]
Id = Annotated[str, typer.Argument(metavar="ID", help="Batch id; `baton batch list` shows them.")]
POLL_S = 1.0
LOST_S_MAX = 60.0
"""A router that is waited for may be away for this long."""
EPILOG = """[bold]Examples[/]

[cyan]ROUTER_FILES_BYTES_MAX=1000000000 baton up[/]   routers keep files and batches

[cyan]baton batch submit requests.jsonl --wait[/]   and show its progress

[cyan]baton batch results batch_0123... --to results.jsonl[/]

[bold]A line of the file[/]

[cyan]{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": []}}[/]

Where API keys are needed, BATON_API_KEY has one; its tenant's batches are shown."""


def add_to(app: typer.Typer) -> None:
    app.add_typer(batch, name="batch", rich_help_panel="Use it")


@batch.command(epilog=EPILOG)
def submit(
    file: Annotated[Path, typer.Argument(help="One request as JSON on each line.")],
    endpoint: Annotated[str, typer.Option(help="Endpoint of all lines: their `url`.")] = "/v1/chat/completions",
    window: Annotated[str, typer.Option(help="The batch expires after so many hours (h) or days (d).")] = "24h",
    wait: Annotated[bool, typer.Option("--wait", help="Show its progress until it has ended.")] = False,
    url: Url = "",
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Upload a file and have its lines served. Prints the id of the batch."""
    with client_of(url, state_dir) as client:
        made = client.submit(file, endpoint, window)
        if not wait:
            print_json(made) if json else print(made.id)
            return
        ended = follow(client, made, quiet=json)
    tell(ended, json=json)


@batch.command()
def wait(batch_id: Id, url: Url = "", state_dir: StateDir = None, json: Json = False) -> None:
    """Show a batch's progress until it has ended. Exits with 1 unless it is completed."""
    with client_of(url, state_dir) as client:
        ended = follow(client, client.batch(batch_id), quiet=json)
    tell(ended, json=json)


@batch.command(name="list")
def list_batches(
    count: Annotated[int, typer.Option(min=1, max=1000, help="How many, the newest first.")] = 20,
    url: Url = "",
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """List batches, with their progress."""
    from services.launcher.views.batch import draw_list

    with client_of(url, state_dir) as client:
        found = client.batches(count)
    print_json(found) if json else show(found, draw_list, json=False, wide=True)


@batch.command(name="show")
def show_batch(batch_id: Id, url: Url = "", state_dir: StateDir = None, json: Json = False) -> None:
    """Show one batch: its progress, its files, and what is wrong with its lines."""
    with client_of(url, state_dir) as client:
        found = client.batch(batch_id)
    _print(found, json=json)


@batch.command()
def cancel(batch_id: Id, url: Url = "", state_dir: StateDir = None, json: Json = False) -> None:
    """End a batch soon. Its results so far can be fetched."""
    with client_of(url, state_dir) as client:
        found = client.cancel(batch_id)
    _print(found, json=json)


@batch.command()
def results(
    batch_id: Id,
    errors: Annotated[bool, typer.Option("--errors", help="The lines that failed, not those that succeeded.")] = False,
    to: Annotated[Path | None, typer.Option(help="A file; default: stdout.", show_default=False)] = None,
    url: Url = "",
    state_dir: StateDir = None,
) -> None:
    """Write the results of a batch that has ended, one JSON object a line."""
    with client_of(url, state_dir) as client:
        found = client.batch(batch_id)
        file_id = found.error_file_id if errors else found.output_file_id
        if not found.has_ended:
            fail(f"{batch_id} is {found.status}: {found.done} of {found.request_counts.total} lines are done.")
        if not file_id:
            other = found.output_file_id if errors else found.error_file_id
            hint = (
                f" `baton batch results {batch_id}{'' if errors else ' --errors'}` writes the others." if other else ""
            )
            fail(f"{batch_id} is {found.status}: no line has {'failed' if errors else 'succeeded'}.{hint}")
        pieces = client.content(file_id)
        try:
            with to.open("wb") if to is not None else sys.stdout.buffer as out:
                out.writelines(pieces)
        except OSError as error:
            fail(f"{to or 'stdout'} cannot be written: {error.strerror}.")


@contextmanager
def client_of(url: str, state_dir: Path | None) -> Iterator[BatchClient]:
    """The API of the router that is named, or of the running system. Its errors end the command."""
    where = router_url(url, state_dir)
    try:
        yield BatchClient(where)
    except CommandFailed as error:
        fail(str(error))


def follow(client: BatchClient, found: Batch, *, quiet: bool) -> Batch:
    """Wait for the end of a batch, with a bar unless ``quiet``. A router may be away for ``LOST_S_MAX``."""
    from services.launcher.views.batch import progress_of

    with progress_of(found, quiet=quiet) as update:
        lost_at: float | None = None
        while not found.has_ended:
            time.sleep(POLL_S)
            try:
                found = client.batch(found.id)
            except CommandFailed:
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > LOST_S_MAX:
                    raise
                continue
            lost_at = None
            update(found)
    return found


def tell(ended: Batch, *, json: bool) -> None:
    """How it ended; exits with 1 unless it is completed."""
    _print(ended, json=json)
    if ended.status != "completed":
        sys.exit(1)


def _print(found: Batch, *, json: bool) -> None:
    from services.launcher.views.batch import draw

    print_json(found) if json else show(found, draw, json=False)
