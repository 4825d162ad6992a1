"""What repeats its work while NATS is away says so once, not at each attempt."""

from __future__ import annotations

import logging

from shared.bus.port import Disconnected


class Outage:
    """The failures of one piece of work that is repeated. The first one is logged, and the next one after it has
    succeeded. That the process has no connection is not logged here: the bus has logged the loss.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._is_logged = False

    def failed(self, what: str, error: Exception) -> None:
        is_known = self._is_logged or isinstance(error, Disconnected)
        self._log.log(
            logging.DEBUG if is_known else logging.WARNING,
            "%s, trying again: %s",
            what,
            str(error) or type(error).__name__,
        )
        self._is_logged = self._is_logged or not is_known

    def over(self) -> None:
        """The work has succeeded."""
        self._is_logged = False
