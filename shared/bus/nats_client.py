"""nats-py's client with direct calls for plain functions: no queue, no task switch, half the time per message."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any

import nats.errors
from nats.aio.client import Client

from shared.deadline import keep_cancellation

Direct = Callable[[bytes, dict[str, str], str, str], None]
"""Payload, headers, subject, reply subject."""

UNSENT_BYTES_MAX = 256 * 1024
"""Above this the flusher task sends, which waits for the socket."""

_NO_HEADERS: dict[str, str] = {}


class NotEncrypted(nats.errors.Error):
    """The server offers no TLS, but the settings require it."""


class DirectClient(Client):
    """Calls a subscription's function while the message is being read. Relies on internals of nats-py 2.16, which is
    pinned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.direct: dict[int, Direct] = {}
        """Functions by subscription id."""

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        self._pings_outstanding = 0  # A server that sends is alive, even if its PONG is queued behind many messages.
        take = self.direct.get(sid)
        if take is None:
            await super()._process_msg(sid, subject, reply, data, headers)
        elif headers:
            take(data, await self._process_headers(headers) or _NO_HEADERS, subject.decode(), reply.decode())
        else:
            take(data, _NO_HEADERS, subject.decode(), reply.decode())

    async def _process_connect_init(self) -> None:
        """Abort the socket if the handshake fails: nats-py would wait for ever for it to close."""
        try:
            await super()._process_connect_init()
        except Exception:
            self.abort()
            self._transport = None
            raise

    async def _attempt_reconnect(self) -> None:
        """Abort the lost socket first: nats-py would wait for ever if it cannot send what is pending."""
        self.abort()
        await super()._attempt_reconnect()

    @property
    def certificate_ends_at(self) -> float:
        """When the server's certificate expires, in Unix time; 0 without TLS."""
        writer = getattr(self._transport, "_io_writer", None)
        connection = writer.get_extra_info("ssl_object") if writer is not None else None
        certificate = connection.getpeercert() if connection is not None else None
        return float(ssl.cert_time_to_seconds(certificate["notAfter"])) if certificate else 0.0

    def abort(self) -> None:
        """Close the socket at once; unsent data is lost."""
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()

    def _connect_command(self) -> bytes:
        """The first command of a connection. Raises NotEncrypted where the settings require TLS and there is none:
        nats-py uses TLS only if the server's INFO asks for it, and a man in the middle can remove that.
        """
        writer = getattr(self._transport, "_io_writer", None)
        if writer is None or writer.get_extra_info("ssl_object") is None:
            if "tls" in self.options:
                raise NotEncrypted
        else:
            writer._protocol._over_ssl = True  # nats-py does not set it, and asyncio would warn at each close
        return super()._connect_command()

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        """Hand pending commands to the transport at once. Its buffer collects the writes of one turn of the event loop;
        the flusher task would cost each of them another turn.
        """
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None and writer.transport.is_closing():  # by the server; the read loop is about to notice
            return None
        if force_flush or not self.is_connected or writer is None or not _takes_more(writer):
            with keep_cancellation():  # nats-py swallows it
                return await super()._flush_pending(force_flush)
        pending, self._pending, self._pending_data_size = self._pending, [], 0
        writer.writelines(pending)
        return None


def _takes_more(writer: Any) -> bool:
    return int(writer.transport.get_write_buffer_size()) <= UNSENT_BYTES_MAX
