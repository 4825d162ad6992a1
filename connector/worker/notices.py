"""Grants that come as notifications of NIXL, ahead of the bus (see ``scheduler.grant_ways``).

NIXL wakes no thread for a notification, so the transfer thread of the engine's first rank looks for them while the
engine waits for grants of other machines, and passes them to the engine's socket. What arrives there is checked like
any grant; here only its size is, and how many come at a time.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from connector.scheduler.grant_socket import GRANT_BYTES_MAX
from connector.transfer.agent import TransferAgent, TransferFailed, failing

LOOK_S = 0.000_5
"""Pause between two looks. Each takes 30 to 40 µs of CPU time."""
NOTICES_AT_ONCE_MAX = 256
"""Notices that a look passes on. More come only from somebody who is not an engine; the bus brings what is dropped."""
log = logging.getLogger("baton.connector")


class Notices:
    """What one rank sends and gets. ``path`` is the socket of its engine."""

    def __init__(self, agent: TransferAgent, path: str, clock: Callable[[], float]) -> None:
        self.is_listening = False
        self._agent = agent
        self._path = path
        self._clock = clock
        self._looked_at = 0.0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def listen(self, *, wanted: bool) -> None:
        """Begin or end to look for notices."""
        self.is_listening = wanted and bool(self._path)

    def look(self) -> None:
        """Pass on what has come, if it is time to look."""
        now = self._clock()
        if not self.is_listening or 0.0 <= now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        try:
            with failing("looking for notices"):
                notices = self._agent.notices()
        except TransferFailed as failed:  # One that NIXL cannot decode. The bus brings the others, too.
            log.info("notices are lost", exc_info=failed)
            return
        for notice in notices[:NOTICES_AT_ONCE_MAX]:
            if len(notice) <= GRANT_BYTES_MAX:
                self._pass_on(notice)

    def close(self) -> None:
        self._socket.close()

    def _pass_on(self, notice: bytes) -> None:
        try:
            self._socket.sendto(notice, self._path)
        except OSError:  # The engine is behind: the bus brings it.
            log.debug("a notice is dropped")
