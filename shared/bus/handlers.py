"""Who wants to know about the connection: the same for both buses."""

from __future__ import annotations

from collections.abc import Callable


class ConnectionHandlers:
    """Callbacks in the order they were given."""

    def __init__(self) -> None:
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
