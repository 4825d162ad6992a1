"""The transfer thread is not bound to the core of the thread that started it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

import pytest

from connector.transfer.threads import allow_cores, in_daemon_thread, unbind_heirs
from shared import numa


@pytest.fixture(autouse=True)
def _two_nodes(tmp_path, monkeypatch):
    """Two simulated NUMA nodes: even cores on one, odd cores on the other."""
    for core in range(64):
        (tmp_path / f"cpu{core}" / f"node{core % 2}").mkdir(parents=True)
    monkeypatch.setattr(numa, "CPUS", tmp_path)


def on_a_thread(call: Callable[[], None]) -> set[int]:
    """Cores that a thread pinned to one core may use after ``call``."""
    found: list[set[int]] = []

    def pinned() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        call()
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    return found[0]


def test_other_cores_of_the_same_node_are_allowed():
    mine = os.sched_getaffinity(0)
    own = min(mine)

    assert on_a_thread(lambda: allow_cores(mine)) == {core for core in mine if core % 2 == own % 2}


def test_cores_of_another_node_are_not_used():
    own = min(os.sched_getaffinity(0))

    assert on_a_thread(lambda: allow_cores([own + 1])) == {own}


def test_without_other_cores_the_affinity_is_unchanged():
    assert on_a_thread(lambda: allow_cores(())) == {min(os.sched_getaffinity(0))}


def test_threads_that_inherited_their_core_may_use_others():
    mine, found = os.sched_getaffinity(0), list[set[int]]()

    def unbind() -> None:
        asked, unbound = threading.Event(), threading.Event()

        def heir() -> None:
            asked.set()
            unbound.wait()
            found.append(os.sched_getaffinity(0))

        thread = threading.Thread(target=heir)
        thread.start()
        asked.wait()
        unbind_heirs(mine)
        unbound.set()
        thread.join()

    assert on_a_thread(unbind) == {min(mine)}
    assert found == [mine]


def test_without_numa_information_all_cores_are_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr(numa, "CPUS", tmp_path / "nothing")
    mine = os.sched_getaffinity(0)

    assert on_a_thread(lambda: allow_cores(mine)) == mine


def test_unknown_cores_are_ignored():
    assert on_a_thread(lambda: allow_cores([10_000])) == {min(os.sched_getaffinity(0))}


async def test_work_in_a_daemon_thread_returns_or_raises():
    def fail() -> None:
        raise ValueError("no")

    assert await in_daemon_thread("work", lambda: threading.current_thread().daemon)
    with pytest.raises(ValueError, match="no"):
        await in_daemon_thread("work", fail)


async def test_the_loop_does_not_wait_for_abandoned_work():
    may_end = threading.Event()
    work = asyncio.create_task(in_daemon_thread("work", may_end.wait))
    await asyncio.sleep(0)

    work.cancel()

    with pytest.raises(asyncio.CancelledError):
        await work
    may_end.set()
