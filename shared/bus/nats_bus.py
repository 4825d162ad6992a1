"""The bus over NATS. It translates the errors and states of nats-py, which only the modules ``nats_*`` import."""

from __future__ import annotations

import shared.bus.nats_import  # noqa: F401

# isort: split
import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, NamedTuple, TypeVar
from uuid import uuid4

import msgspec
import nats.errors

from shared.addresses import servers_of
from shared.bus.jetstream import REPLICAS_MAX, BucketStream
from shared.bus.nats_client import CONNECTED, ConnectionErrors, DirectClient, Sender, without_password
from shared.bus.nats_credentials import OPEN, Access, credentials
from shared.bus.nats_kv_store import NatsKeyValueStore
from shared.bus.nats_subscription import REFUSED_HEADER, Inbox, LiveSubscription, Take, is_reply_subject, subject_filter
from shared.bus.port import (
    ASKS_AT_ONCE_MAX,
    BATCH_S,
    AskTimedOut,
    BusCounts,
    BusDown,
    BusRefused,
    Connection,
    Disconnected,
    Envelope,
    Handler,
    KeyValueStore,
    NoResponders,
    Responder,
    Subscription,
)
from shared.bus.receiver import SUBJECT_SHOWN_MAX, Receiver, Reply, count_bad, make_reply, read_reply, unreadable
from shared.bus.wire import BadMessage, can_be_sent_to, pack
from shared.contracts.channels import AskChannel, Channel, bucket_of
from shared.deadline import end, within, within_lives

log = logging.getLogger("baton.bus")

M = TypeVar("M", bound=msgspec.Struct)
A = TypeVar("A", bound=msgspec.Struct)

FRAME_BUDGET_BYTES: Final = 64 * 1024 * 1024
QUEUE_MAX: Final = 65536
"""Messages queued for one handler."""
CONNECT_ATTEMPT_S_MAX: Final = 2
RECONNECT_WAIT_S: Final = 0.2
PING_INTERVAL_S: Final = 1
UNANSWERED_PINGS_MAX: Final = 5
"""A silent server is noticed after about six seconds, a closed connection at once. A shorter limit would disconnect
healthy processes on a machine that stalls for a moment.
"""
UNSENT_BYTES_MAX: Final = 16 * 1024 * 1024
"""Unsent bytes above which a sender waits for the socket."""
SEND_S_MAX: Final = 10.0
"""Longest wait of a sender for the socket."""
CLOSE_S_MAX: Final = 2.0
BATCHED_CONNECT_S_MAX: Final = 30.0
"""Time limit for the connection of subscriptions that are read in batches."""


async def connect_nats(
    url: str,
    *,
    name: str,
    connect_s_max: float = 30.0,
    frame_budget_bytes: int = FRAME_BUDGET_BYTES,
    access: Access = OPEN,
) -> NatsBus:
    """Connect, retrying for ``connect_s_max``. Raises BusDown with the last error; BusRefused after a few attempts if
    NATS rejects the credentials, and at once if its certificate is not trusted.
    """
    bus = NatsBus(Server(url, name, access), frame_budget_bytes)
    await bus.open(connect_s_max)
    return bus


class Server(NamedTuple):
    """A server, and who connects."""

    url: str
    name: str
    access: Access


class _TooLate(Exception):
    """The deadline of the first connection has passed. Not an OSError: nats-py would retry after one."""


class NatsBus(Connection):
    """One connection; implements ``port.Bus``."""

    def __init__(self, server: Server, frame_budget_bytes: int, *, read_pause_s: float = 0.0) -> None:
        super().__init__()
        self.frame_budget_bytes = frame_budget_bytes
        self.counts = BusCounts()
        self._server = server
        self._nc = DirectClient(read_pause_s)
        self._login = login = credentials(server.url, server.access)
        self._errors = ConnectionErrors(server.url, server.access)
        self._batched: NatsBus | None = None
        """The connection of subscriptions that are read in batches."""
        self._opening = asyncio.Lock()
        """Held while that one is opened."""
        self._inbox = Inbox(f"{login.inboxes}.{uuid4().hex}", lambda key: self._call(self.unreachable, key))
        self._sender = Sender(self._nc, frame_budget_bytes, self._inbox.token)
        self._subscriptions: set[LiveSubscription] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._connect_until = math.inf
        """Deadline of the first connection, in the event loop's time."""

    async def open(self, connect_s_max: float) -> None:
        """Connect and subscribe to the inbox. Raises BusDown."""
        url, name, _access = self._server
        connecting = self._nc.connect(
            servers_of(url),
            name=name,
            inbox_prefix=self._login.inboxes,
            connect_timeout=CONNECT_ATTEMPT_S_MAX,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # nats-py says int and accepts fractions
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=UNANSWERED_PINGS_MAX,
            pending_size=UNSENT_BYTES_MAX,
            flush_timeout=SEND_S_MAX,
            skip_subject_validation=True,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
            **self._login.options,
        )
        self._connect_until = asyncio.get_running_loop().time() + connect_s_max
        try:
            await within(connect_s_max, self._connected(connecting), name="connect to NATS")
        except (BusDown, _TooLate, OSError, nats.errors.Error) as error:
            why = str(self._nc.last_error or error) or "no response"
            await self.close()
            if isinstance(error, BusDown):
                raise
            raise BusDown(f"no NATS at {without_password(url)} within {connect_s_max:g} s: {why}") from error
        self._connect_until = math.inf
        self._errors.is_first_attempt = False
        self.counts.certificate_ends_at = self._nc.certificate_ends_at
        await self._subscribe(self._inbox.subject, self._inbox.on_message, QUEUE_MAX, None)

    async def _connected(self, connecting: Coroutine[Any, Any, None]) -> None:
        await connecting
        if self._closing:  # The deadline has passed, and the attempt lost its cancellation.
            await self._nc.close()

    @property
    def max_payload(self) -> int:
        return self._nc.max_payload

    @property
    def connected(self) -> bool:
        return self._nc._status == CONNECTED and not self._closing

    @property
    def reads(self) -> int:
        return self._nc.reads

    async def publish(
        self, channel: Channel[M], message: M, *, headers: Mapping[str, str] | None = None, key: str = ""
    ) -> None:
        subject, payload, reply = self._addressed(channel, message, key)
        if subject:
            await self._sender.send(subject, payload, headers, reply)

    def publish_now(
        self, channel: Channel[M], message: M, *, headers: Mapping[str, str] | None = None, key: str = ""
    ) -> bool:
        subject, payload, reply = self._addressed(channel, message, key)
        return not subject or self._sender.send_now(subject, payload, headers, reply)

    def hold(self) -> None:
        self._nc.hold()

    def release(self) -> None:
        self._nc.release()

    def _addressed(self, channel: Channel[M], message: M, key: str) -> tuple[str, bytes, str]:
        """Subject, payload and reply subject; an empty subject if the message must not be sent."""
        subject = channel.address(message)
        payload = pack(message)
        if not can_be_sent_to(subject):
            log.warning("%r is not a valid subject: not sent", subject[:SUBJECT_SHOWN_MAX])
            if key:
                asyncio.get_running_loop().call_soon(self._call, self.unreachable, key)
            return "", payload, ""
        return subject, payload, self._inbox.for_key(key) if key else ""

    async def subscribe(
        self,
        channel: Channel[M],
        handler: Handler[M],
        *,
        queue_max: int = QUEUE_MAX,
        on_dropped: Callable[[], None] | None = None,
        in_batches: bool = False,
        **ids: str,
    ) -> Subscription:
        if in_batches:
            batched = await self._batched_connection()
            if on_dropped is not None:
                batched.on_reconnect(on_dropped)
            return await batched.subscribe(
                channel, handler, queue_max=queue_max, on_dropped=on_dropped, in_batches=False, **ids
            )
        receiver = Receiver(channel, handler, self.counts, self.fail)

        async def take(payload: bytes, headers: dict[str, str], subject: str, _reply: str) -> None:
            await receiver.take(payload, headers, subject)

        return await self._subscribe(
            subject_filter(channel, ids), take if receiver.is_async else receiver.take_now, queue_max, on_dropped
        )

    async def _batched_connection(self) -> NatsBus:
        async with self._opening:
            if self._batched is None:
                batched = NatsBus(self._server, self.frame_budget_bytes, read_pause_s=BATCH_S)
                batched.counts = self.counts
                await batched.open(BATCHED_CONNECT_S_MAX)
                batched.failed.add_done_callback(self._fail_with)
                self._batched = batched
            return self._batched

    def _fail_with(self, other: asyncio.Future[None]) -> None:
        if not other.cancelled() and (why := other.exception()) is not None:
            self.fail(why)

    async def ask(
        self, channel: AskChannel[M, A], message: M, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> A:
        subject = channel.address(message)
        if not can_be_sent_to(subject):
            raise NoResponders(f"{subject[:SUBJECT_SHOWN_MAX]!r} is not a valid subject")
        return read_reply(await self._ask(subject, pack(message), headers, timeout_s), channel, message)

    async def request(self, subject: str, payload: bytes, headers: Mapping[str, str] | None, timeout_s: float) -> bytes:
        """Ask a service that has other messages than Baton's. Raises NoResponders, AskTimedOut, BusDown."""
        return (await self._ask(subject, payload, headers, timeout_s))[0]

    async def _ask(self, subject: str, payload: bytes, headers: Mapping[str, str] | None, timeout_s: float) -> Reply:
        with self._inbox.expect(subject) as (reply_subject, reply):
            try:
                async with asyncio.timeout(timeout_s):
                    await self._sender.send(subject, payload, headers, reply_subject)
                    return await reply
            except TimeoutError as late:
                raise AskTimedOut(f"{subject}: no reply within {timeout_s:g} s") from late

    async def answer(self, channel: AskChannel[M, A], responder: Responder[M, A], **ids: str) -> Subscription:
        free_slots = asyncio.Semaphore(ASKS_AT_ONCE_MAX)

        async def work(payload: bytes, headers: dict[str, str], subject: str, reply: str) -> None:
            try:
                envelope = Envelope(headers, len(payload))
                made = await make_reply(channel, responder, payload, subject, envelope, self.frame_budget_bytes)
            except BadMessage as bad:
                count_bad(self.counts, subject, bad)
                made = unreadable(bad)
            except Exception as bug:
                log.exception("the responder of %s raised: the bus ends", channel.subject)
                self.fail(bug)
                return
            finally:
                free_slots.release()
            await self._reply(reply, made)

        async def take(payload: bytes, headers: dict[str, str], subject: str, reply: str) -> None:
            if not is_reply_subject(reply):
                count_bad(self.counts, subject, BadMessage(f"the reply subject {reply[:SUBJECT_SHOWN_MAX]!r}"))
                return
            await free_slots.acquire()
            self._spawn(work(payload, headers, subject, reply), f"answer {channel.subject}")

        return await self._subscribe(subject_filter(channel, ids), take, QUEUE_MAX, None)

    async def key_value_store(self, channel: Channel[M]) -> KeyValueStore[M]:
        store = NatsKeyValueStore(self, channel)
        await store.open()
        return store

    async def make_bucket(
        self, channel: Channel[Any], *, ttl_s: float | None, file_bytes_max: int = 0, drops_oldest: bool = False
    ) -> None:
        replicas_max = REPLICAS_MAX if self._nc.is_clustered else 1
        await BucketStream(self, bucket_of(channel)).make(
            ttl_s, file_bytes_max, drops_oldest=drops_oldest, replicas_max=replicas_max
        )

    async def listen(self, subject: str, take: Take) -> Subscription:
        """Pass all messages on a subject to ``take``. Raises BusDown."""
        return await self._subscribe(subject, take, QUEUE_MAX, None)

    async def flush(self, timeout_s: float) -> None:
        if not self.connected:
            raise Disconnected("NATS cannot be reached")
        try:
            # A PONG is lost with its connection, and nats-py waits on.
            await within_lives(timeout_s, lambda: self._flush(timeout_s), self._lives, name="flush")
        except (TimeoutError, nats.errors.Error) as error:
            raise BusDown(f"flush: {error}") from error

    def _lives(self) -> int:
        """Connections that replaced another one."""
        return int(self._nc.stats["reconnects"])

    async def _flush(self, timeout_s: float) -> None:
        # nats-py writes the PING before the pending data; without this line the PONG would prove nothing.
        await self._nc._flush_pending(force_flush=True)
        await self._nc.flush(timeout_s)  # type: ignore[arg-type]  # nats-py says int and accepts fractions

    async def close(self) -> None:
        if self._closing:
            return
        if self._batched is not None:
            await self._batched.close()
        if self.connected:
            try:
                await self.flush(CLOSE_S_MAX)
            except BusDown:
                log.info("NATS was lost before everything was sent")
        self._closing = True
        await end(self._tasks)
        try:
            # nats-py waits until the socket has sent everything: for ever if the server does not read.
            await within(CLOSE_S_MAX, self._nc.close(), name="close the connection to NATS")
        except TimeoutError:
            self._nc.abort()
        except RuntimeError as closed:  # uvloop's, when nats-py writes what is left to a socket that NATS has closed
            log.info("the connection to NATS was closed before everything was sent: %s", closed)
            self._nc.abort()

    async def _reply(self, subject: str, reply: Reply) -> None:
        payload, refused = reply
        try:
            await self._sender.send(subject, payload, {REFUSED_HEADER: "1"} if refused else None, "")
        except BusDown:
            log.info("a reply was not sent: NATS is down")

    async def _subscribe(
        self, subject: str, take: Take, queue_max: int, on_dropped: Callable[[], None] | None
    ) -> LiveSubscription:
        subscription = LiveSubscription(
            self._nc,
            take,
            self.counts,
            frame_budget_bytes=self.frame_budget_bytes,
            on_dropped=on_dropped,
            on_closed=self._subscriptions.discard,
        )
        try:
            await subscription.open(subject, queue_max=queue_max, queue_bytes_max=2 * self.frame_budget_bytes)
        except nats.errors.Error as error:
            raise BusDown(f"subscribe to {subject}: {error!r}") from error
        self._subscriptions.add(subscription)
        try:
            await self.flush(SEND_S_MAX)  # The PONG proves that the server has read the SUB.
        except BusDown:
            if self.connected:
                await subscription.close()
                raise
            log.info("NATS is not connected: the subscription to %s begins after reconnecting", subject)
        return subscription

    def _call(self, handlers: list[Callable[..., None]], *arguments: str) -> None:
        try:
            for handler in handlers:
                handler(*arguments)
        except Exception as bug:  # nats-py would treat it as a failed reconnection.
            log.exception("a connection handler raised: the bus ends")
            self.fail(bug)

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            for subscription in self._subscriptions:
                if subscription.nats is error.sub:
                    subscription.on_slow()
            return
        try:
            self._errors.report(error)
        except BusRefused as refused:
            if math.isfinite(self._connect_until):
                raise
            self.fail(refused)
        # nats-py calls this after each failed attempt, and an exception from here ends its endless loop of attempts.
        if asyncio.get_running_loop().time() >= self._connect_until:
            raise _TooLate

    async def _on_disconnected(self) -> None:
        if self._closing:
            return
        log.warning("the connection to NATS was lost")
        # nats-py would send pending commands after the reconnection, perhaps minutes later. A stale StartLeg does harm.
        self._nc._pending.clear()
        self._nc._pending_data_size = 0
        self._inbox.fail_all(lambda: Disconnected("the connection to NATS was lost"))
        self._call(self.disconnected)

    async def _on_reconnected(self) -> None:
        self.counts.reconnects += 1
        self.counts.certificate_ends_at = self._nc.certificate_ends_at
        self._errors.connected()
        log.warning("reconnected to NATS")
        self._call(self.reconnected)

    async def _on_closed(self) -> None:
        if not self._closing:
            self.fail(BusDown(f"NATS closed the connection permanently: {self._nc.last_error}"))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
