"""The transfer thread is not bound to the core of the thread that started it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from connector.transfer import cpu_affinity
from connector.transfer.cpu_affinity import allow_cores


@pytest.fixture(autouse=True)
def _two_nodes(tmp_path, monkeypatch):
    """Every second core is of another node, none of which the test's machine needs to have."""
    for core in range(64):
        (tmp_path / f"cpu{core}" / f"node{core % 2}").mkdir(parents=True)
    monkeypatch.setattr(cpu_affinity, "CPUS", tmp_path)


def on_a_thread(call: Callable[[], None]) -> set[int]:
    """Where a thread may run that was pinned to one core and then did that."""
    found: list[set[int]] = []

    def pinned() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        call()
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    return found[0]


def test_it_may_run_on_other_cores_that_are_near():
    mine = os.sched_getaffinity(0)
    own = min(mine)

    assert on_a_thread(lambda: allow_cores(mine)) == {core for core in mine if core % 2 == own % 2}


def test_cores_of_another_node_are_left_alone():
    own = min(os.sched_getaffinity(0))

    assert on_a_thread(lambda: allow_cores([own + 1])) == {own}


def test_without_other_cores_it_stays_where_it_is():
    assert on_a_thread(lambda: allow_cores(())) == {min(os.sched_getaffinity(0))}


def test_without_numa_nodes_all_cores_are_near(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_affinity, "CPUS", tmp_path / "nothing")
    mine = os.sched_getaffinity(0)

    assert on_a_thread(lambda: allow_cores(mine)) == mine


def test_unknown_cores_are_ignored():
    assert on_a_thread(lambda: allow_cores([10_000])) == {min(os.sched_getaffinity(0))}
