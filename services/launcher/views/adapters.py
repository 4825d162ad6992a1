"""`baton lora`: adapters and the results of orders, as text."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from services.launcher.bus_client import AdapterView
from shared.contracts.adapters import AdapterAction, AdapterOrdered, WantedAdapter
from shared.contracts.workers import LoraAdapter

DIGEST_CHARS = 12
ORDERS_SHOWN = 10


def result_lines(result: AdapterOrdered) -> Iterator[str]:
    """One line for each worker, as markup."""
    name = escape(result.order.name)
    if not result.changes:
        yield f"[green]✓[/] {name} was loaded on no worker."
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
