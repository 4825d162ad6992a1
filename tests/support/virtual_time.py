"""An event loop whose time jumps to the next timer when nothing else is to do: a minute passes in milliseconds. It stands
still while a thread works for the loop.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

THREADS_S_MAX = 30.0
"""So long a thread may take, in real time, before timers fire or, with no timer set, the test fails."""


class _JumpingSelector(selectors.DefaultSelector):
    now = 0.0
    threads = 0
    """Calls in threads that have not ended."""

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and (timeout is None or (timeout and self.threads)):
            ready = super().select(THREADS_S_MAX)
        if not ready:
            if timeout is None:
                raise RuntimeError("everybody waits for something that cannot come")
            self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For memory buses and timers; sockets would be outrun."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        running = super().run_in_executor(executor, func, *args)
        if executor is None or isinstance(executor, ThreadPoolExecutor):  # not a test's own, which may never end
            self._jumping.threads += 1
            running.add_done_callback(self._thread_ended)
        return running

    def _thread_ended(self, _running: asyncio.Future[Any]) -> None:
        self._jumping.threads -= 1


class LoopClock:
    """The running loop's time as a Clock."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wall_ms(self) -> int:
        return round(self.now() * 1000)

    def wall_s(self) -> float:
        return self.now()


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine function, as one that runs in virtual time."""
    return as_test(test, lambda *args, **kwargs: run_in_virtual_time(test(*args, **kwargs)))


def as_test(test: Callable[..., Any], run: Callable[..., None], given: int = 0) -> Callable[..., None]:
    """``run`` with the name and the parameters of ``test``, but for the first ones, which it gives to it."""
    functools.update_wrapper(run, test)
    parameters = list(inspect.signature(test).parameters.values())[given:]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
