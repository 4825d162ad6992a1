"""What is known of each process."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from rich.console import Console

from services.launcher.system.screen import Board, Outlet, Screen
from shared.contracts.control import ServicePhase, ServiceStatus
from shared.runtime.clock import SystemClock


def board_with_a_router() -> Board:
    board = Board()
    board.plan("router")
    board.started("router", pid=7, now=10.0)
    return board


def status(phase: ServicePhase, pid: int = 7, detail: str = "") -> ServiceStatus:
    return ServiceStatus(service="router", instance="r", phase=phase, pid=pid, detail=detail, url="http://x")


def test_a_status_belongs_to_the_process_that_sent_it():
    board = board_with_a_router()

    assert board.heard(status(ServicePhase.READY, pid=8), now=11.0) is None
    assert board.heard(status(ServicePhase.READY), now=11.0) is board.rows["router"]


def test_the_duration_stops_when_a_process_is_ready():
    board = board_with_a_router()
    board.heard(status(ServicePhase.STARTING, detail="loading weights"), now=12.0)
    board.heard(status(ServicePhase.READY), now=13.5)

    assert board.rows["router"].seconds(now=99.0) == 3.5


def test_listeners_are_called_for_changes_only():
    board = board_with_a_router()
    heard: list[tuple[ServicePhase | None, str]] = []
    board.on_change(lambda row: heard.append((row.phase, row.detail)))

    for _ in range(3):
        board.heard(status(ServicePhase.STARTING, detail="loading weights"), now=12.0)

    assert heard == [(ServicePhase.STARTING, "loading weights")]


def test_a_stopping_process_no_longer_counts_as_ready():
    board = board_with_a_router()
    board.draining("router", now=12.0)

    board.heard(status(ServicePhase.READY), now=12.1)

    assert board.rows["router"].phase is ServicePhase.DRAINING


@pytest.mark.parametrize("pair", [os.pipe, os.openpty], ids=["pipe", "terminal"])
def test_a_system_goes_on_when_what_reads_its_screen_is_gone(pair: Callable[[], tuple[int, int]]):
    """`baton up | tee log` ends tee on Ctrl-C, too; a closed terminal takes no more text."""
    reading, writing = pair()
    with os.fdopen(writing, "w") as stream:
        board = Board()
        screen = Screen(board, SystemClock(), Console(file=Outlet(stream)))
        os.close(reading)

        screen.show("Stopping.")
        with screen.watching():
            board.plan("router")
            board.started("router", pid=7, now=10.0)
        screen.show_error("It has stopped.")
