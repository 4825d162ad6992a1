"""Threads that copy: the cores they may use, and threads that may be stuck in a library.

On a CPU vLLM pins the model's thread to a core, and threads started from it inherit that. A copy would then share the
core with the model while other cores are idle.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from shared.numa import node_of

THREADS = Path("/proc/self/task")
T = TypeVar("T")
_Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


def allow_cores(cores: Iterable[int]) -> None:
    """Let the calling thread also run on those of these cores that are in a NUMA node of its own cores."""
    own = os.sched_getaffinity(0)
    nodes = {node_of(core) for core in own}
    near = {core for core in cores if node_of(core) in nodes}
    with suppress(OSError):  # None of the cores may be used any more; the thread stays where it is.
        os.sched_setaffinity(0, own | near)


def leave_cores(cores: set[int]) -> None:
    """Move the calling thread off these cores, if it has others."""
    if others := os.sched_getaffinity(0) - cores:
        os.sched_setaffinity(0, others)


def unbind_heirs(cores: Iterable[int]) -> None:
    """Let all threads that have inherited the calling thread's cores use these cores, too."""
    own, me = os.sched_getaffinity(0), threading.get_native_id()
    for thread in (int(task.name) for task in THREADS.iterdir()):
        with suppress(OSError):  # It has ended.
            if thread != me and os.sched_getaffinity(thread) == own:
                os.sched_setaffinity(thread, own | set(cores))


@contextmanager
def keep_cores() -> Iterator[None]:
    """Undo what a library does to the affinity of the calling thread, which later runs the model."""
    cores = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


class DaemonThreads:
    """Runs jobs in order, on at most ``count`` threads, which start with the first job."""

    def __init__(self, name: str, count: int, initializer: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._count = count
        self._initializer = initializer
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Queue a job. Not thread-safe."""
        future: Future[T] = Future()
        self._jobs.put((future, work, args))
        if len(self._threads) < self._count:
            name = f"{self._name}_{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
            self._threads[-1].start()
        return future

    def close(self, wait_s: float) -> None:
        """End the threads after the queued jobs. Waits for each of them at most so long."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(wait_s)

    def _run(self) -> None:
        self._initializer()
        while (job := self._jobs.get()) is not None:
            future, work, args = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work(*args))
            except BaseException as error:
                future.set_exception(error)
            del future, work, args, job  # A result holds an agent, which must end with its last user.


async def in_daemon_thread(name: str, work: Callable[[], T]) -> T:
    """The result of ``work``. Unlike with ``asyncio.to_thread``, the process's end does not wait for the thread."""
    threads = DaemonThreads(name, 1)
    done = threads.submit(work)
    threads.close(0.0)
    return await asyncio.wrap_future(done)
