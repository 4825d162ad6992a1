"""A supervised process says that its event loop runs, in systemd's protocol (sd_notify(3)): to systemd, or to the
launcher of `baton up`. The supervisor ends a process that has said nothing for the time that it gave.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import MutableMapping

ADDRESS, LIMIT_US, FOR_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
VARIABLES = (ADDRESS, LIMIT_US, FOR_PID)
"""Variables with which a supervisor asks one process, not its children, for heartbeats."""
BEAT, PAUSE = b"WATCHDOG=1", b"WATCHDOG_USEC=0"
BEATS_PER_LIMIT = 4
"""Three may be late or lost."""


class Heartbeat:
    """Sent by a timer of the event loop: it stops with the loop, whatever other threads do."""

    def __init__(self, address: str = "", limit_s: float = 0.0) -> None:
        """Without an address nothing is sent."""
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._limit_s = limit_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) if address else None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """From now on the supervisor may expect the event loop to run. Call it in the loop; again does nothing."""
        if self._socket is not None and self._timer is None:
            self._send(b"WATCHDOG_USEC=%d" % (self._limit_s * 1e6))  # After a pause.
            self._beat()

    def pause(self) -> None:
        """Until ``begin`` the event loop may stand still: the process loads what it needs, or ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._send(PAUSE)

    def _beat(self) -> None:
        self._send(BEAT)
        self._timer = asyncio.get_running_loop().call_later(self._limit_s / BEATS_PER_LIMIT, self._beat)

    def _send(self, message: bytes) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # The supervisor is gone, or stands still itself.
                self._socket.sendto(message, self._address)


def heartbeat_of(environ: MutableMapping[str, str]) -> Heartbeat:
    """The heartbeat that these variables ask for, which are removed."""
    address, limit_us, for_pid = (environ.pop(name, "") for name in VARIABLES)
    if not (address and limit_us.isdigit() and for_pid in {"", str(os.getpid())}):
        return Heartbeat()
    return Heartbeat(address, int(limit_us) / 1e6)
