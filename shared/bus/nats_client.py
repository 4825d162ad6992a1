"""One connection of nats-py: direct calls for plain functions (no queue, no task switch, half the time per message),
payloads sent in parts if they exceed the server's limit, and errors as messages for the operator.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
from collections.abc import Mapping
from itertools import count
from typing import Any, Final
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client

from shared.addresses import servers_of
from shared.bus.nats_credentials import Access
from shared.bus.nats_reader import LINE_END, MessageReader, Take, header_block
from shared.bus.port import BusDown, BusRefused, Disconnected, MessageTooLarge
from shared.bus.wire import PART_HEADER, PART_MARGIN_BYTES, header_bytes, split
from shared.deadline import keep_cancellation

CONNECTED: Final = Client.CONNECTED
UNSENT_BYTES_MAX: Final = 256 * 1024
"""Above this the flusher task sends, which waits for the socket."""
READ_WAIT_PAUSES_MAX: Final = 0.5
READS_AT_ONCE_MAX: Final = 4
"""Reads after which pauses begin, if each came within ``READ_WAIT_PAUSES_MAX`` pauses, counted from the read, or the
end of the pause, before it: where a pause joins only one or two messages, its timer and its changes of the socket cost
more than it saves."""


class NotEncrypted(nats.errors.Error):
    """The server offers no TLS, but the settings require it."""


class DirectClient(Client):
    """Calls a subscription's function while the message is being read (see ``MessageReader``), and hands messages to
    the socket at once. Relies on internals of nats-py 2.16, which is pinned.
    """

    def __init__(self, read_pause_s: float = 0.0) -> None:
        """``read_pause_s``: between two reads of the socket while many messages come."""
        super().__init__()
        self._read_pause_s = read_pause_s
        self.reads = 0
        """Reads of the socket, of any connection."""
        self._waits_since = 0.0
        """The last read, or the end of the pause after it."""
        self._reads_at_once = 0
        self._takes: dict[int, Take] = {}
        self._messages: MessageReader | None = None
        self._socket: asyncio.Transport | None = None
        """Socket of the established connection."""
        self._held: list[bytes] | None = None
        """Pieces of commands that go to the socket with ``release``; None: commands go there at once."""

    def listen(self, subscription: int, take: Take) -> None:
        """Call ``take`` for the messages of this subscription, now and after each reconnection."""
        self._takes[subscription] = take
        if self._messages is not None:
            self._messages.listen(subscription, take)

    def forget(self, subscription: int) -> None:
        """Call nothing for them any more."""
        self._takes.pop(subscription, None)
        if self._messages is not None:
            self._messages.forget(subscription)

    def _heard(self) -> None:
        self.reads += 1
        self._pings_outstanding = 0  # A server that sends is alive, even if its PONG is queued behind many messages.
        if not self._read_pause_s or self._socket is None:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        waited_s, self._waits_since = now - self._waits_since, now
        self._reads_at_once = self._reads_at_once + 1 if waited_s < READ_WAIT_PAUSES_MAX * self._read_pause_s else 0
        if self._reads_at_once >= READS_AT_ONCE_MAX:
            self._socket.pause_reading()
            loop.call_later(self._read_pause_s, self._read_on, self._socket)

    def _read_on(self, socket: asyncio.Transport) -> None:
        if not socket.is_closing():
            self._waits_since = asyncio.get_running_loop().time()
            socket.resume_reading()

    async def _process_connect_init(self) -> None:
        """Abort the socket if the handshake fails: nats-py would wait for ever for it to close."""
        try:
            await super()._process_connect_init()
        except Exception:
            self.abort()
            self._transport = None
            raise
        streams: Any = self._transport
        writer, reader = streams._io_writer, streams._io_reader
        self._messages = ours = MessageReader(writer._protocol, self._heard)
        for subscription, take in self._takes.items():
            ours.listen(subscription, take)
        self._socket = writer.transport
        self._socket.set_protocol(ours)  # type: ignore[arg-type]  # compiled, it has no base class of Python's
        if already := bytes(reader._buffer):
            reader._buffer.clear()
            ours.data_received(already)

    async def _attempt_reconnect(self) -> None:
        """Abort the lost socket first: nats-py would wait for ever if it cannot send what is pending."""
        self.abort()
        await super()._attempt_reconnect()

    async def _process_pong(self) -> None:
        """A flush that has given up leaves its future behind: nats-py would end the connection for the late PONG."""
        if self._pongs and self._pongs[0].done():
            self._pongs.pop(0)
            self._pings_outstanding = 0
        else:
            await super()._process_pong()

    @property
    def is_clustered(self) -> bool:
        """Whether the server is one of several."""
        return bool(self._server_info.get("cluster"))

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

    def publish_now(self, subject: str, payload: bytes, reply: str, headers: Mapping[str, str] | None) -> bool:
        """Hand a message to the socket. Returns False where ``publish`` must do it, whose six coroutines take several
        times as long.
        """
        socket = self._socket
        if self._pending or self._status != CONNECTED or socket is None or socket.is_closing():
            return False
        if socket.get_write_buffer_size() > UNSENT_BYTES_MAX:
            return False
        if headers:
            block = header_block(headers)
            line = f"HPUB {subject} {reply} {len(block)} {len(block) + len(payload)}\r\n"
            pieces = [line.encode(), block, payload, LINE_END]
        else:
            pieces = [f"PUB {subject} {reply} {len(payload)}\r\n".encode(), payload, LINE_END]
        if self._held is None:
            socket.write(b"".join(pieces))
        else:
            self._held += pieces
        return True

    def hold(self) -> None:
        self._held = []

    def release(self) -> None:
        held, self._held = self._held, None
        if held and self._socket is not None:
            self._socket.write(b"".join(held))

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        """Hand pending commands to the transport, which writes them to the socket at once (uvloop 0.23): the flusher
        task would cost another turn of the event loop. So would collecting the messages of one turn; with 64 clients
        that saved no CPU.
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


class Sender:
    """The sending side of one connection: in parts if need be, in order per subject."""

    def __init__(self, nc: DirectClient, frame_budget_bytes: int, token: str) -> None:
        self._nc = nc
        self._frame_budget_bytes = frame_budget_bytes
        self._locks = SubjectLocks()
        self._token = token
        self._numbers = count()

    def send_now(self, subject: str, payload: bytes, headers: Mapping[str, str] | None, reply: str) -> bool:
        """Hand one payload to the connection, unless that must wait. Raises BusDown, MessageTooLarge."""
        nc = self._nc
        if nc._status != CONNECTED:  # Its properties take ten times as long.
            raise Disconnected("NATS cannot be reached")
        size = len(payload)
        if size + PART_MARGIN_BYTES + header_bytes(headers) > nc._max_payload:
            if size > self._frame_budget_bytes:
                raise MessageTooLarge(f"{size} bytes; at most {self._frame_budget_bytes} travel on the bus")
            return False
        return subject not in self._locks and nc.publish_now(subject, payload, reply, headers)

    async def send(self, subject: str, payload: bytes, headers: Mapping[str, str] | None, reply: str) -> None:
        """Hand one payload to the connection. Raises BusDown, MessageTooLarge."""
        if self.send_now(subject, payload, headers, reply):
            return
        nc, size = self._nc, len(payload)
        try:
            if size + PART_MARGIN_BYTES + header_bytes(headers) > nc.max_payload:
                await self._send_parts(subject, payload, headers, reply)
            elif subject in self._locks:
                await self._locks.acquire(subject)
                try:
                    await nc.publish(subject, payload, reply, headers or None)  # type: ignore[arg-type]
                finally:
                    self._locks.release(subject)
            else:
                await nc.publish(subject, payload, reply, headers or None)  # type: ignore[arg-type]  # nats-py says dict and only reads
        except nats.errors.Error as error:
            raise BusDown(f"{subject}: {error!r}") from error

    async def _send_parts(self, subject: str, payload: bytes, headers: Mapping[str, str] | None, reply: str) -> None:
        part_bytes_max = self._nc.max_payload - PART_MARGIN_BYTES - header_bytes(headers)
        if part_bytes_max <= 0:
            raise MessageTooLarge(f"headers of {header_bytes(headers)} bytes leave no space for the message")
        message_id = f"{self._token}-{next(self._numbers)}"
        parts = list(split(payload, part_bytes_max, message_id))
        # Later messages on this subject wait for the lock, so that order is kept while this one waits for the socket.
        await self._locks.acquire(subject)
        try:
            for number, (part_header, part) in enumerate(parts, 1):
                if not self._nc.is_connected:
                    raise Disconnected("the connection to NATS was lost while a message in parts was sent")
                # Only the last part, which completes the message, makes the server report a missing subscriber.
                part_reply = reply if number == len(parts) else ""
                await self._nc.publish(subject, bytes(part), part_reply, {**(headers or {}), PART_HEADER: part_header})
        finally:
            self._locks.release(subject)


class _SubjectLock:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0


class SubjectLocks:
    """``subject in locks`` is the cheap check; a sender that finds a lock, or needs one, calls ``acquire``."""

    def __init__(self) -> None:
        self._locks: dict[str, _SubjectLock] = {}

    def __contains__(self, subject: object) -> bool:
        return subject in self._locks

    async def acquire(self, subject: str) -> None:
        """Be the only sender on the subject until ``release``; senders take turns in the order of their calls."""
        lock = self._locks.setdefault(subject, _SubjectLock())
        lock.users += 1
        try:
            await lock.lock.acquire()
        except BaseException:
            self._forget(subject, lock)
            raise

    def release(self, subject: str) -> None:
        lock = self._locks[subject]
        lock.lock.release()
        self._forget(subject, lock)

    def _forget(self, subject: str, lock: _SubjectLock) -> None:
        lock.users -= 1
        if not lock.users:
            del self._locks[subject]


log = logging.getLogger("baton.bus")

ERRORS_LOGGED_MAX: Final = 64
"""Distinct errors that one connection logs."""

LOGINS_MAX: Final = 5
"""Refused logins of a first connection until the key counts as unknown: a nats-server that reads its configuration anew
also refuses clients whose login is under way.
"""
REFUSED_S_MAX: Final = 30.0
"""A process that was connected gives up after its key has been refused for so long: `baton init` may change keys."""

_VIOLATION: Final = re.compile(r"permissions violation for (\w+) to \"([^\"]*)\"", re.IGNORECASE)
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
_NAMES_ANOTHER: Final = (62, 64)
"""OpenSSL's numbers: the certificate is for another host name, or another address."""


class ConnectionErrors:
    """Logs each error of one connection once, again after a reconnection. One that a retry cannot fix ends the first
    connection attempt.
    """

    def __init__(self, url: str, access: Access) -> None:
        self.is_first_attempt = True
        """False once the connection is established, or cannot be."""
        self._url = url
        self._access = access
        self._logged: set[str] = set()
        self._refused_logins = 0
        self._refused_since: float | None = None
        """The first refused login since the last connection, in the event loop's time."""

    def report(self, error: Exception) -> None:
        """Log an error of the connection. Raises BusRefused if a retry by this process is useless."""
        why = refusal(error, self._url, self._access)
        if why and self.is_first_attempt:
            if _is_refused_login(error):
                self._refused_logins += 1
                if self._refused_logins < LOGINS_MAX:
                    return
            self.is_first_attempt = False
            raise BusRefused(why) from error
        text = why or violation(error) or unresolved(error, self._url)
        if _is_refused_login(error):
            now = asyncio.get_running_loop().time()
            self._refused_since = self._refused_since or now
            if now - self._refused_since > REFUSED_S_MAX:
                raise BusRefused(why) from error
        if not text:
            log.debug("NATS: %s", error)
        elif text not in self._logged and len(self._logged) < ERRORS_LOGGED_MAX:
            self._logged.add(text)
            log.error("%s", text)

    def connected(self) -> None:
        """After a reconnection: the next outage is reported again."""
        self._refused_since = None
        self._logged.clear()


def violation(error: Exception) -> str:
    """The message for a permissions violation; empty for other errors."""
    found = _VIOLATION.search(str(error))
    if found is None:
        return ""
    action = "publish" if found[1].lower() == "publish" else "subscribe"
    return (
        f"NATS: permissions violation: this process's key may not {action} to {found[2][:200]!r}. If it should, NATS "
        "has the permissions of another version: run `baton init` again and let nats-server reload them (SIGHUP)."
    )


def unresolved(error: Exception, url: str) -> str:
    """The message if a server's name has no address; empty for other errors."""
    if not isinstance(error, socket.gaierror):
        return ""
    return (
        f"NATS at {without_password(url)}: the name {_hosts(url)} cannot be resolved ({error.strerror}). This process "
        "tries again until it can be: check the name, /etc/hosts and the name servers in /etc/resolv.conf."
    )


def refusal(error: Exception, url: str, access: Access) -> str:
    """The message if the server and this process reject each other; empty if a retry may help."""
    shown = without_password(url)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"NATS at {shown}: {_untrusted_certificate(error, url, access)}"
    if isinstance(error, NotEncrypted):
        return (
            f"NATS at {shown} offers no encryption, but this process requires it (BATON_NATS_CA_FILE, tls://): "
            "nothing was sent. Let nats-server include the secure.conf that `baton init` made."
        )
    if _is_refused_login(error):
        return f"NATS at {shown} {_unknown_key(url, access)}"
    return ""


def _is_refused_login(error: Exception) -> bool:
    return "authorization violation" in str(error).lower()


def without_password(url: str) -> str:
    """The URL, or URLs with commas between them, for logs and messages."""
    parts = [urlsplit(each) for each in (servers_of(url) if "," in url else [url])]
    return ",".join(each._replace(netloc=each.netloc.rpartition("@")[2]).geturl() for each in parts)


def _hosts(url: str) -> str:
    return " or ".join(urlsplit(each).hostname or "" for each in servers_of(url))


def _untrusted_certificate(error: ssl.SSLCertVerificationError, url: str, access: Access) -> str:
    host = _hosts(url)
    if error.verify_code == _EXPIRED:
        return (
            "its certificate has expired, unless this machine's clock is wrong. Make another with `baton init --renew` "
            "and let nats-server read it (SIGHUP)."
        )
    if error.verify_code == _NOT_YET_VALID:
        return "its certificate is not valid yet: the clock of this machine, or of the one that made it, is wrong."
    if error.verify_code in _NAMES_ANOTHER:
        return f"its certificate is not for {host}: make one that is, with `baton init --renew --host {host}`."
    if access.ca_file:
        return (
            f"its certificate is not signed by the CA in {access.ca_file}. If this is the right server, "
            "BATON_NATS_CA_FILE must name the ca.pem that `baton init` made with its certificate."
        )
    return "its certificate is not trusted: BATON_NATS_CA_FILE must name the ca.pem that `baton init` made."


def _unknown_key(url: str, access: Access) -> str:
    if access.nkey_file:
        return (
            f"does not know the key in {access.nkey_file}. Keys and secure.conf are made together by `baton init`; "
            "has nats-server read this one (SIGHUP)? A joined host whose token was revoked needs a new one."
        )
    if urlsplit(servers_of(url)[0]).username:
        return "rejects this user and password."
    return "requires a key: BATON_NATS_NKEY_FILE must name the key of this party, which `baton init` made."
