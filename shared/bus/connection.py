"""What every implementation of the bus shares: handlers of connection events, and the failure that ends the bus."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger("baton.bus")


class Connection:
    """Handlers are called in the order of their registration; ``failed`` carries the exception that ended the bus."""

    def __init__(self) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.unreachable: list[Callable[[str], None]] = []
        self.disconnected: list[Callable[[], None]] = []
        self.reconnected: list[Callable[[], None]] = []

    def on_unreachable(self, handler: Callable[[str], None]) -> None:
        self.unreachable.append(handler)

    def on_disconnect(self, handler: Callable[[], None]) -> None:
        self.disconnected.append(handler)

    def on_reconnect(self, handler: Callable[[], None]) -> None:
        self.reconnected.append(handler)

    def fail(self, why: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(why)
            self.failed.exception()  # Marks it as retrieved: asyncio warns about unread exceptions.

    def end_with(self, task: asyncio.Task[None]) -> None:
        bug = None if task.cancelled() else task.exception()
        if bug is not None:
            log.error("the task %s raised: the bus ends", task.get_name(), exc_info=bug)
            self.fail(bug)
