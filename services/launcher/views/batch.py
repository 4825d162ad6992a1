"""``baton batch`` on the terminal: a bar, a table, one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from services.launcher.batch_client import Batch

STYLES = {"completed": "green", "failed": "bold red", "expired": "yellow", "cancelled": "yellow"}


@contextmanager
def progress_of(batch: Batch, *, quiet: bool) -> Iterator[Callable[[Batch], None]]:
    """A bar on stderr; call the function with each newer state."""
    console = Console(stderr=True, quiet=quiet)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(batch.status, total=None)

        def update(now: Batch) -> None:
            failed = f", {now.request_counts.failed} failed" if now.request_counts.failed else ""
            total = now.request_counts.total or None
            progress.update(task, description=now.status + failed, completed=now.done, total=total)

        update(batch)
        yield update


def draw_list(batches: list[Batch], console: Console) -> None:
    """One line for each batch."""
    if not batches:
        console.print("There are no batches. Make one with `baton batch submit FILE`.")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("batch", "created", "endpoint", "status"):
        table.add_column(heading, overflow="fold")
    for heading in ("done", "failed"):
        table.add_column(heading, justify="right")
    for one in batches:
        table.add_row(
            one.id, _at(one.created_at), one.endpoint, _status(one), done_of(one), str(one.request_counts.failed)
        )
    console.print(table)


def draw(batch: Batch, console: Console) -> None:
    """One batch, a line for each fact."""
    counts = batch.request_counts
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_row("batch", batch.id)
    table.add_row("status", _status(batch))
    table.add_row("lines", f"{done_of(batch)} done, {counts.failed} failed")
    if batch.model:
        table.add_row("model", Text(batch.model))
    table.add_row("endpoint", batch.endpoint)
    if batch.usage is not None and counts.completed:
        table.add_row("tokens", f"{batch.usage.input_tokens:,} of prompts, {batch.usage.output_tokens:,} generated")
    table.add_row("created", _at(batch.created_at))
    if not batch.has_ended:
        table.add_row("expires", _at(batch.expires_at))
    for name, file_id in (
        ("input", batch.input_file_id),
        ("output", batch.output_file_id),
        ("errors", batch.error_file_id),
    ):
        if file_id:
            table.add_row(name, file_id)
    console.print(table)
    for fault in batch.errors.data if batch.errors is not None else []:
        where = f"line {fault.line}: " if fault.line is not None else ""
        console.print(Text(f"✗ {where}{fault.message} ({fault.code})", "red"), soft_wrap=True)


def done_of(batch: Batch) -> str:
    """Such as ``120 of 400 (30%)``."""
    total = batch.request_counts.total
    return f"{batch.done} of {total} ({batch.done / total:.0%})" if total else "0"


def _status(batch: Batch) -> Text:
    return Text(batch.status, STYLES.get(batch.status, ""))


def _at(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
