"""nats-py's client with a short cut for plain functions: no queue, no task switch, half the time per message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nats.errors
from nats.aio.client import Client

from shared.deadline import keep_cancellation

Direct = Callable[[bytes, dict[str, str], str, str], None]
"""Payload, headers, subject, reply subject."""

UNSENT_BYTES_MAX = 256 * 1024
"""Above this the flusher task takes over, which waits for the socket."""

_NO_HEADERS: dict[str, str] = {}


class NotEncrypted(nats.errors.Error):
    """The server offers no TLS, and we were told to speak to nobody without it."""


class DirectClient(Client):
    """Calls a subscription's function while the message is being read. Made for nats-py 2.16, which is pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.direct: dict[int, Direct] = {}
        """Functions by subscription id."""

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        self._pings_outstanding = 0  # Whoever sends messages lives, even if a PONG waits behind many of them.
        take = self.direct.get(sid)
        if take is None:
            await super()._process_msg(sid, subject, reply, data, headers)
        elif headers:
            take(data, await self._process_headers(headers) or _NO_HEADERS, subject.decode(), reply.decode())
        else:
            take(data, _NO_HEADERS, subject.decode(), reply.decode())

    async def _process_connect_init(self) -> None:
        """After a handshake that failed, nats-py would wait for ever for its connection to end: it is dropped here."""
        try:
            await super()._process_connect_init()
        except Exception:
            self.abort()
            self._transport = None
            raise

    async def _attempt_reconnect(self) -> None:
        """nats-py would wait until the lost connection has taken what is unsent: for ever if the server is silent."""
        self.abort()
        await super()._attempt_reconnect()

    def abort(self) -> None:
        """Drop the socket at once, with what was not sent yet."""
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()

    def _connect_command(self) -> bytes:
        """The first thing that we say, and nothing is said in clear that was to be encrypted, whatever the server
        offers: nats-py encrypts when the server asks for it, which whoever stands between could leave out.
        """
        writer = getattr(self._transport, "_io_writer", None)
        if writer is None or writer.get_extra_info("ssl_object") is None:
            if "tls" in self.options:
                raise NotEncrypted
        else:
            writer._protocol._over_ssl = True  # nats-py does not tell it, and each goodbye would be a warning
        return super()._connect_command()

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        """Hand what is pending to the transport at once: its own buffer gathers the writes of one turn of the loop,
        and a trip through the flusher task would cost each of them a turn.
        """
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None and writer.transport.is_closing():  # by the server: the reading side is about to hear it
            return None
        if force_flush or not self.is_connected or writer is None or not _takes_more(writer):
            with keep_cancellation():  # which nats-py swallows
                return await super()._flush_pending(force_flush)
        pending, self._pending, self._pending_data_size = self._pending, [], 0
        writer.writelines(pending)
        return None


def _takes_more(writer: Any) -> bool:
    return int(writer.transport.get_write_buffer_size()) <= UNSENT_BYTES_MAX
