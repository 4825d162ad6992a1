"""Sends notifications from the engine to its worker after a step, without ever blocking."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import zmq
from zmq.constants import Flag, SocketOption, SocketType

from connector.messages import EngineNotification

NOTIFICATION_QUEUE_MAX = 4096
"""Messages queued for a slow worker; further ones are dropped, which is safe because leases and requests expire."""

log = logging.getLogger("baton.connector")


class NotificationSocket:
    """A ZMQ PUSH socket; does nothing if ``endpoint`` is empty."""

    def __init__(self, endpoint: str) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._socket: Any = None
        self.dropped = 0
        if endpoint:
            self._socket = zmq.Context.instance().socket(SocketType.PUSH)  # type: ignore[attr-defined]
            self._socket.setsockopt(SocketOption.SNDHWM, NOTIFICATION_QUEUE_MAX)
            self._socket.setsockopt(SocketOption.LINGER, 0)
            self._socket.connect(endpoint)

    def push(self, notification: EngineNotification) -> None:
        """Send, or drop and count if the queue is full."""
        if self._socket is None:
            return
        try:
            self._socket.send(self._encode(notification), Flag.NOBLOCK)
        except zmq.error.Again:
            self.dropped += 1
            log.warning("the worker does not receive its engine's notifications: %d dropped", self.dropped)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
