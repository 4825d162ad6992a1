"""The table of `baton workers`."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest

from services.launcher.bus_client import Fleet
from services.launcher.terminal import Console, harmless
from services.launcher.views.workers import fleet_table, natural_order
from shared.contracts.workers import FleetState, FleetWorker, WorkerPhase
from tests.support.fleet_builders import record


@pytest.mark.parametrize(("columns", "has_process"), [(80, False), (200, True)])
def test_no_value_is_cut_off_in_a_narrow_terminal(columns: int, has_process: bool):
    written = msgspec.structs.replace(record("prefill-1", WorkerPhase.READY), note="no partner")
    worker = FleetWorker(record=written, phase=WorkerPhase.READY, since_s=47.0, silent_s=0.0)
    console = Console(file=io.StringIO(), width=columns)

    console.print(fleet_table(Fleet(FleetState(leader="o-1", term=1, workers=[worker]), False), console.width))

    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "…" not in text
    assert "no partner" in text
    assert {"prefill-1", "ready", *written.models} <= set(text.split())
    assert (f"{written.host}:{written.pid}" in text) == has_process


def test_numbers_in_names_count_as_numbers():
    names = ["decode-10", "decode-2", "both-1", "decode-2-a"]

    assert sorted(names, key=natural_order) == ["both-1", "decode-2", "decode-2-a", "decode-10"]


HOSTILE = "m\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e[bold]\x00"
"""Sets a terminal's title, empties it, turns text around, and closes markup that was never opened."""


@pytest.mark.parametrize("columns", [80, 200])
def test_nothing_that_a_worker_sends_reaches_the_terminal_as_an_order(columns: int):
    texts = {"models": [HOSTILE + "[/]"], "note": HOSTILE, "host": HOSTILE, "engine": HOSTILE}
    written = msgspec.structs.replace(record("w1", WorkerPhase.READY), **texts)
    worker = FleetWorker(record=written, phase=WorkerPhase.READY, since_s=47.0, silent_s=0.0)
    console = Console(file=io.StringIO(), width=columns)

    console.print(fleet_table(Fleet(FleetState(leader=HOSTILE, term=1, workers=[worker]), False), console.width))

    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert all(line.isprintable() for line in text.split("\n"))
    assert "[bold]" in text


def test_every_command_draws_on_the_console_that_strips_orders():
    sources = {file: file.read_text() for file in Path("services/launcher").rglob("*.py")}

    assert [file.name for file, text in sources.items() if "rich.console import Console\n" in text] == []
    assert harmless(HOSTILE) == "m]0;owned[2J31m[bold]"
