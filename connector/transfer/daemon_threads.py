"""Threads that may be stuck in a library: unlike a ThreadPoolExecutor's, they do not keep the process from ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


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
