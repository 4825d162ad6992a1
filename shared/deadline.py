"""Deadlines that hold although a third party loses its cancellation.

Before Python 3.12 ``asyncio.wait_for`` returns normally when the future that it waits for ends in the turn of the event
loop in which the cancellation arrives. nats-py waits that way, and swallows cancellations while it flushes. A loop that
tries again after each error then never ends, and ``asyncio.timeout`` cancels only once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

log = logging.getLogger("baton.deadline")

T = TypeVar("T")

GRACE_S = 1.0
"""How long a cancelled task may take to end before it is abandoned."""
LOOK_S = 0.2
"""How soon a changed life is noticed."""
CANCELS_MAX = 10
"""Cancellations per grace period: one that is lost is repeated."""


async def within(seconds: float, work: Coroutine[Any, Any, T], *, name: str, grace_s: float = GRACE_S) -> T:
    """The result of ``work``, which runs as a task of its own.

    Raises TimeoutError after ``seconds``, at the latest ``grace_s`` after that, whatever the work does with its
    cancellation. Work that does not end is abandoned: it keeps running, and its outcome is dropped. The caller closes
    what the work uses.
    """
    task = asyncio.get_running_loop().create_task(work, name=name)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
    finally:
        await end({task}, grace_s=grace_s)
    raise TimeoutError(f"{name}: not within {seconds:g} s")


async def within_lives(
    seconds: float, work: Callable[[], Coroutine[Any, Any, T]], life: Callable[[], int], *, name: str
) -> T:
    """As ``within``, for work that never ends if ``life`` changes meanwhile, such as a wait for a reply on a connection
    that was replaced: then it begins anew.
    """
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + seconds
    while (left_s := ends_at - loop.time()) > 0:
        begun, task = life(), loop.create_task(work(), name=name)
        try:
            while left_s > 0 and life() == begun:
                await asyncio.wait({task}, timeout=min(LOOK_S, left_s))
                if task.done():
                    return task.result()
                left_s = ends_at - loop.time()
        finally:
            await end({task}, grace_s=GRACE_S)
    raise TimeoutError(f"{name}: not within {seconds:g} s")


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, T], *, grace_s: float = GRACE_S) -> T | None:
    """The result of ``work``, or None if the event is set first; then the work is ended."""
    task = asyncio.get_running_loop().create_task(work)
    waiting = asyncio.get_running_loop().create_task(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await end({task, waiting}, grace_s=grace_s)


async def end(tasks: Collection[asyncio.Task[Any]], *, grace_s: float = GRACE_S) -> None:
    """Cancel the tasks until they have ended, and abandon those that are not done after ``grace_s``."""
    pending = {task for task in tasks if not task.done()}
    for _ in range(CANCELS_MAX):
        if not pending:
            return
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=grace_s / CANCELS_MAX)
        for task in done:
            _drop_outcome(task)
    for task in pending:
        log.error("the task %s ignores its cancellation: abandoned", task.get_name())
        task.add_done_callback(_drop_outcome)


@contextmanager
def keep_cancellation() -> Iterator[None]:
    """Raise CancelledError at the end of the block if the current task was cancelled inside it and the block continued.

    For calls that end by themselves, soon, but may lose a cancellation: around each await on nats-py.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    except Exception as error:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError from error
        raise
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError


def _drop_outcome(task: asyncio.Task[Any]) -> None:
    """Read the task's exception, which asyncio would otherwise report as never retrieved."""
    if not task.cancelled():
        task.exception()
