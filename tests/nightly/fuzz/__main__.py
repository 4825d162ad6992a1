"""``make fuzz``: 100,000 inputs of each kind, through both edges and on every channel of the bus; says what broke.

A hang of ``HANG_S_MAX`` ends it with the stacks of all threads.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from shared.contracts.channels import CHANNELS, AskChannel
from tests.nightly.fuzz.body_fuzz import fuzz_bodies
from tests.nightly.fuzz.bus_fuzz import Campaign, Plan, fuzz_bus
from tests.nightly.fuzz.edge_fuzz import fuzz_edges
from tests.nightly.fuzz.tokenizer_fuzz import SHARE, fuzz_tokenizers

COUNT = 100_000
HANG_S_MAX = 120.0
MIB = 1024 * 1024


class Shown:
    """A bar over everything, and the watch over hangs."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)
        self._done = 0
        self._name, self._sent = "", 0

    def __call__(self, name: str, sent: int) -> None:
        if name != self._name:
            self._progress.console.print(name, highlight=False)
        faulthandler.dump_traceback_later(HANG_S_MAX, exit=True)
        self._done += sent - (self._sent if name == self._name else 0)
        self._name, self._sent = name, sent
        self._progress.update(self._task, completed=self._done, description=name)


def main() -> int:
    """Answers how many campaigns found something."""
    parser = argparse.ArgumentParser(prog="python -m tests.nightly.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="inputs of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only",
        default="",
        help="edge (of router and collector), bodies, tokenizers, parts of channels' names; with commas",
    )
    asked = parser.parse_args()
    console, only = Console(), tuple(asked.only.split(","))
    bus = [channel for name, channel in CHANNELS.items() if any(part in name for part in only)]
    edge, bodies, tokenizers = (any(part in kind for part in only) for kind in ("edge", "bodies", "tokenizers"))
    kinds = len(bus) + sum(isinstance(channel, AskChannel) for channel in bus) + 2 * edge + bodies
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    campaigns: list[Campaign] = []
    with Progress(*columns, console=console) as progress, tempfile.TemporaryDirectory() as state_dir:
        shown = Shown(progress, kinds * asked.count + tokenizers * asked.count // SHARE)
        if edge:
            campaigns += fuzz_edges(asked.count, asked.seed, shown)
        if bodies:
            campaigns.append(fuzz_bodies(asked.count, asked.seed, shown))
        if tokenizers:
            campaigns.append(fuzz_tokenizers(Plan(asked.count, asked.seed, only, shown)))
        campaigns += fuzz_bus(Path(state_dir), Plan(asked.count, asked.seed, only, shown)) if bus else []
        faulthandler.cancel_dump_traceback_later()
    console.print(table(campaigns))
    for campaign in campaigns:
        for finding in campaign.findings:
            console.print(f"[red]{campaign.name}[/]:", finding, highlight=False, markup=True)
    return sum(bool(campaign.findings) for campaign in campaigns)


def table(campaigns: list[Campaign]) -> Table:
    """Of all campaigns."""
    drawn = Table("what", "sent", "heard", "read", "objects", "MiB", "found", box=None)
    for each in campaigns:
        numbers = (each.sent, each.heard, each.read, each.objects_grown)
        grown = f"{each.bytes_grown / MIB:+.1f}"
        drawn.add_row(each.name, *(f"{number:,}" for number in numbers), grown, str(len(each.findings)))
    return drawn


if __name__ == "__main__":
    sys.exit(min(main(), 1))
