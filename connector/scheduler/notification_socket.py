"""The way out of the engine: notifications for the worker, pushed after a step and never waited for."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import zmq
from zmq.constants import Flag, SocketOption, SocketType

from connector.messages import EngineNotification

NOTIFICATION_QUEUE_MAX = 4096
"""Messages kept for a worker that does not take them; beyond, they are dropped: every lease and ask has a deadline."""

log = logging.getLogger("baton.connector")


class NotificationSocket:
    """Pushes to the worker's socket; to nobody, if ``endpoint`` is empty."""

    def __init__(self, endpoint: str) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._socket: Any = None
        self.dropped = 0
        if endpoint:
            self._socket = zmq.Context.instance().socket(SocketType.PUSH)  # type: ignore[attr-defined]
            self._socket.setsockopt(SocketOption.SNDHWM, NOTIFICATION_QUEUE_MAX)
            self._socket.setsockopt(SocketOption.LINGER, 0)
            self._socket.connect(endpoint)

    def push(self, notifications: EngineNotification) -> None:
        """Send, or drop and count."""
        if self._socket is None:
            return
        try:
            self._socket.send(self._encode(notifications), Flag.NOBLOCK)
        except zmq.error.Again:
            self.dropped += 1
            log.warning("the worker does not take its engine's notifications: %d dropped", self.dropped)

    def close(self) -> None:
        """No more notifications."""
        if self._socket is not None:
            self._socket.close()
