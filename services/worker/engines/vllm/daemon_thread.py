"""Long blocking work in a thread that does not delay the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar, cast

T = TypeVar("T")


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """The result of ``work``. Unlike with ``asyncio.to_thread``, the loop's end does not wait for the thread."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(cast("T", result))
        else:
            done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="start-engine", daemon=True).start()
    return await done
