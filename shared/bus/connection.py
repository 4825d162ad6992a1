"""Who wants to know about the connection, and what ends it: the same for both buses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger("baton.bus")


class Connection:
    """Callbacks in the order they were given, and the future that a bug ends."""

    def __init__(self) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.unreachable: list[Callable[[str], None]] = []
        self.disconnected: list[Callable[[], None]] = []
        self.reconnected: list[Callable[[], None]] = []

    def on_unreachable(self, handler: Callable[[str], None]) -> None:
        """See ``Bus``."""
        self.unreachable.append(handler)

    def on_disconnect(self, handler: Callable[[], None]) -> None:
        """See ``Bus``."""
        self.disconnected.append(handler)

    def on_reconnect(self, handler: Callable[[], None]) -> None:
        """See ``Bus``."""
        self.reconnected.append(handler)

    def fail(self, why: BaseException) -> None:
        """End the bus."""
        if not self.failed.done():
            self.failed.set_exception(why)
            self.failed.exception()  # Read once here: nobody need be watching.

    def end_with(self, task: asyncio.Task[None]) -> None:
        """See ``Bus``."""
        bug = None if task.cancelled() else task.exception()
        if bug is not None:
            log.error("the task %s raised: the bus ends", task.get_name(), exc_info=bug)
            self.fail(bug)
