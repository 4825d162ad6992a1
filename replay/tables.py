"""Results as tables: on the screen, and as Markdown and JSON in files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from replay.results import Result

COLUMNS: dict[str, Callable[[Result], str]] = {
    "policy": lambda r: r.policy,
    "TTFT p50 s": lambda r: f"{r.ttft.p50:.2f}",
    "p95": lambda r: f"{r.ttft.p95:.2f}",
    "p99": lambda r: f"{r.ttft.p99:.2f}",
    "mean": lambda r: f"{r.ttft.mean:.2f}",
    "ITL p50 ms": lambda r: f"{r.itl.p50 * 1e3:.1f}",
    "p95 ": lambda r: f"{r.itl.p95 * 1e3:.1f}",
    "p99 ": lambda r: f"{r.itl.p99 * 1e3:.1f}",
    "hit %": lambda r: f"{r.hit_share * 100:.1f}",
    "+fetched %": lambda r: f"{r.fetched_share * 100:.1f}",
    "goodput/s": lambda r: f"{r.goodput_per_s:.3f}",
    "good %": lambda r: f"{r.good_share * 100:.1f}",
    "refused": lambda r: str(r.refused),
    "preempted": lambda r: str(r.preemptions),
    "CPU s": lambda r: f"{r.cpu_s:.0f}",
}


def title_of(result: Result) -> str:
    """Of the table for one load."""
    load = f"{result.load:.3g} times the trace"
    return f"{result.label}: {result.offered_per_s:.2f} requests/s ({load})"


def table_of(results: Sequence[Result]) -> Table:
    """For the screen; all of one load."""
    table = Table(title=title_of(results[0]), title_justify="left")
    for name in COLUMNS:
        table.add_column(name.strip(), justify="left" if name == "policy" else "right")
    for result in results:
        table.add_row(*(column(result) for column in COLUMNS.values()))
    return table


def markdown_of(results: Sequence[Result]) -> str:
    """One table for each load."""
    parts = []
    for label in dict.fromkeys(result.label for result in results):
        rows = [result for result in results if result.label == label]
        lines = [f"### {title_of(rows[0])}", ""]
        lines.append("| " + " | ".join(name.strip() for name in COLUMNS) + " |")
        lines.append("|---" + "|---:" * (len(COLUMNS) - 1) + "|")
        lines += ["| " + " | ".join(column(row) for column in COLUMNS.values()) + " |" for row in rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def save(results: Sequence[Result], folder: Path) -> list[Path]:
    """``results.md`` and ``results.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "results.md", folder / "results.json"]
    paths[0].write_text(markdown_of(results))
    paths[1].write_bytes(msgspec.json.format(msgspec.json.encode(list(results)), indent=1) + b"\n")
    return paths
