"""`baton batch`: files and batches of a router, over HTTP, and how they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote

import httpx
import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from services.launcher.bus_client import CommandFailed
from services.launcher.router_api import base_of, decoded, reaching, refuse
from services.launcher.system.machine import API_KEY_VARIABLE, key_headers
from services.launcher.terminal import Console

T = TypeVar("T")

KEY_HINT = f"Set {API_KEY_VARIABLE} to an API key."
HTTP_S_MAX = 60.0
PAGE = 100
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


class Counts(msgspec.Struct, frozen=True):
    """Lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Tokens(msgspec.Struct, frozen=True):
    """Tokens of all lines that were answered."""

    input_tokens: int = 0
    output_tokens: int = 0


class Fault(msgspec.Struct, frozen=True):
    """What is wrong with the input."""

    code: str = ""
    message: str = ""
    line: int | None = None


class Faults(msgspec.Struct, frozen=True):
    """OpenAI's list of them."""

    data: list[Fault] = msgspec.field(default_factory=list)


class Batch(msgspec.Struct, frozen=True):
    """A batch as the API tells it; times in seconds since 1970."""

    id: str
    status: str
    endpoint: str = ""
    input_file_id: str = ""
    created_at: int = 0
    expires_at: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: Faults | None = None
    request_counts: Counts = Counts()
    model: str | None = None
    usage: Tokens | None = None

    @property
    def has_ended(self) -> bool:
        """It does not change any more."""
        return self.status in ENDED

    @property
    def done(self) -> int:
        """Lines with a result."""
        return self.request_counts.completed + self.request_counts.failed


class _Page(msgspec.Struct):
    data: list[Batch]
    has_more: bool = False


class _File(msgspec.Struct):
    id: str


class BatchClient:
    """One router's API. All methods raise CommandFailed, with a message for the user."""

    def __init__(self, url: str) -> None:
        self._base = base_of(url)
        with reaching(self._base):
            self._http = httpx.Client(
                base_url=f"{self._base}/v1", timeout=HTTP_S_MAX, headers=key_headers(), trust_env=False
            )

    def submit(self, path: Path, endpoint: str, window: str) -> Batch:
        """Upload the file, and make a batch of it."""
        try:
            with path.open("rb") as content:
                file_id = self._upload(path.name, content)
        except OSError as error:
            raise CommandFailed(f"{path} cannot be read: {error.strerror}.") from error
        wanted = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        return self._asked("POST", "/batches", Batch, json=wanted)

    def batch(self, batch_id: str) -> Batch:
        """A batch as it is now."""
        return self._asked("GET", f"/batches/{quote(batch_id, safe='')}", Batch)

    def cancel(self, batch_id: str) -> Batch:
        """End a batch soon."""
        return self._asked("POST", f"/batches/{quote(batch_id, safe='')}/cancel", Batch)

    def batches(self, count: int) -> list[Batch]:
        """The newest batches, at most ``count``."""
        found: list[Batch] = []
        while len(found) < count:
            after = {"after": found[-1].id} if found else {}
            limit = str(min(PAGE, count - len(found)))
            page = self._asked("GET", "/batches", _Page, params={"limit": limit, **after})
            found += page.data
            if not page.has_more:
                break
        return found

    def content(self, file_id: str) -> Iterator[bytes]:
        address = f"/files/{quote(file_id, safe='')}/content"
        with reaching(self._base), self._http.stream("GET", address) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
                refuse(response, self._base, KEY_HINT)
            yield from response.iter_bytes()

    def _upload(self, name: str, content: BinaryIO) -> str:
        form = {"data": {"purpose": "batch"}, "files": {"file": (name, content)}}
        return self._asked("POST", "/files", _File, **form).id

    def _asked(self, method: str, path: str, kind: type[T], **kw: Any) -> T:
        with reaching(self._base):
            response = self._http.request(method, path, **kw)
        return decoded(response, kind, self._base, KEY_HINT)


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
