"""The real bus. With ``nats_kept`` it is the only door to nats-py; its errors and states become ours here."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar
from uuid import uuid4
from weakref import WeakSet

import msgspec
import nats.errors

from shared.bus.connection import Connection
from shared.bus.nats_client import DirectClient
from shared.bus.nats_credentials import OPEN, Access, Credentials, credentials
from shared.bus.nats_errors import Complaints, without_password
from shared.bus.nats_inbox import REFUSED_HEADER, Inbox
from shared.bus.nats_kv_store import NatsKeyValueStore
from shared.bus.nats_sender import Sender
from shared.bus.nats_subscription import Listening, Take, filter_of
from shared.bus.port import (
    ASKS_AT_ONCE_MAX,
    Answerer,
    AskTimedOut,
    BusCounts,
    BusDown,
    Envelope,
    Handler,
    KeyValueStore,
    NoResponders,
    Subscription,
)
from shared.bus.receiver import SUBJECT_SHOWN_MAX, Receiver, Reply, count_bad, make_reply, read_reply, unreadable
from shared.bus.wire import BadMessage, can_be_sent_to, pack
from shared.contracts.channels import AskChannel, Channel
from shared.deadline import end, within

log = logging.getLogger("baton.bus")

M = TypeVar("M", bound=msgspec.Struct)
A = TypeVar("A", bound=msgspec.Struct)

FRAME_BUDGET_BYTES = 64 * 1024 * 1024
QUEUE_MAX = 65536
"""Messages that wait for one handler."""
CONNECT_ATTEMPT_S_MAX = 2
RECONNECT_WAIT_S = 0.2
PING_INTERVAL_S = 1
UNANSWERED_PINGS_MAX = 5
"""A server that went silent is noticed after about six seconds; one that ended, at once. Less would cut off healthy
processes on a machine that stands still for a moment.
"""
UNSENT_BYTES_MAX = 16 * 1024 * 1024
"""Above this a sender waits until the socket takes more."""
SEND_S_MAX = 10.0
"""A sender waits no longer than this for the socket."""
GOODBYE_S_MAX = 2.0


async def connect_nats(
    url: str,
    *,
    name: str,
    connect_s_max: float = 30.0,
    frame_budget_bytes: int = FRAME_BUDGET_BYTES,
    access: Access = OPEN,
) -> NatsBus:
    """Connect, trying again until ``connect_s_max`` has passed. Raises BusDown with the last error, and at once when
    NATS refuses us or is not the right one.
    """
    bus = NatsBus(frame_budget_bytes, credentials(url, access), Complaints(url, access))
    await bus.open(url, name, connect_s_max)
    return bus


class _TooLate(Exception):
    """The deadline of the first connection has passed. No subclass of OSError: nats-py would try again."""


class NatsBus(Connection):
    """One connection. See ``port.Bus``."""

    def __init__(self, frame_budget_bytes: int, known_by: Credentials, complaints: Complaints) -> None:
        super().__init__()
        self.frame_budget_bytes = frame_budget_bytes
        self.counts = BusCounts()
        self._nc = DirectClient()
        self._known_by = known_by
        self._complaints = complaints
        self._inbox = Inbox(f"{known_by.inboxes}.{uuid4().hex}", lambda key: self._tell(self.unreachable, key))
        self._sender = Sender(self._nc, frame_budget_bytes, self._inbox.token)
        self._listenings: WeakSet[Listening] = WeakSet()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._connect_until = math.inf
        """When the first connection must be there, in the event loop's time."""

    async def open(self, url: str, name: str, connect_s_max: float) -> None:
        """Connect and listen for answers. Raises BusDown."""
        connecting = self._nc.connect(
            url,
            name=name,
            inbox_prefix=self._known_by.inboxes,
            connect_timeout=CONNECT_ATTEMPT_S_MAX,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # nats-py says int and sleeps any number
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=UNANSWERED_PINGS_MAX,
            pending_size=UNSENT_BYTES_MAX,
            flush_timeout=SEND_S_MAX,
            skip_subject_validation=True,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
            **self._known_by.options,
        )
        self._connect_until = asyncio.get_running_loop().time() + connect_s_max
        try:
            await within(connect_s_max, self._connected(connecting), name="connect to NATS")
        except (BusDown, _TooLate, OSError, nats.errors.Error) as error:
            why = self._nc.last_error or error
            await self.close()
            if isinstance(error, BusDown):
                raise
            raise BusDown(f"no NATS at {without_password(url)} within {connect_s_max:g} s: {why}") from error
        self._connect_until = math.inf
        self._complaints.is_first_attempt = False
        await self._listen(self._inbox.subject, self._inbox.on_message, QUEUE_MAX, None)

    async def _connected(self, connecting: Coroutine[Any, Any, None]) -> None:
        await connecting
        if self._closing:  # The deadline has passed, and the attempt lost its cancellation.
            await self._nc.close()

    @property
    def max_payload(self) -> int:
        return self._nc.max_payload

    @property
    def connected(self) -> bool:
        return self._nc.is_connected and not self._closing

    async def publish(
        self, channel: Channel[M], message: M, *, headers: Mapping[str, str] | None = None, key: str = ""
    ) -> None:
        subject = channel.address(message)
        payload = pack(message)
        if not can_be_sent_to(subject):
            log.warning("nobody can listen on %r: not sent", subject[:SUBJECT_SHOWN_MAX])
            if key:
                asyncio.get_running_loop().call_soon(self._tell, self.unreachable, key)
            return
        reply = self._inbox.for_key(key) if key else ""
        await self._sender.send(subject, payload, headers, reply)

    async def subscribe(
        self,
        channel: Channel[M],
        handler: Handler[M],
        *,
        queue_max: int = QUEUE_MAX,
        on_dropped: Callable[[], None] | None = None,
        **ids: str,
    ) -> Subscription:
        receiver = Receiver(channel, handler, self.counts, self.fail)

        async def take(payload: bytes, headers: dict[str, str], subject: str, _reply: str) -> None:
            await receiver.take(payload, headers, subject)

        def take_now(payload: bytes, headers: dict[str, str], subject: str, _reply: str) -> None:
            receiver.take_now(payload, headers, subject)

        return await self._listen(filter_of(channel, ids), take if receiver.waits else take_now, queue_max, on_dropped)

    async def ask(
        self,
        channel: AskChannel[M, A],
        message: M,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> A:
        subject = channel.address(message)
        if not can_be_sent_to(subject):
            raise NoResponders(f"nobody can listen on {subject[:SUBJECT_SHOWN_MAX]!r}")
        with self._inbox.expect(subject) as (reply_subject, reply):
            try:
                async with asyncio.timeout(timeout_s):
                    await self._sender.send(subject, pack(message), headers, reply_subject)
                    return read_reply(await reply, channel.answer)
            except TimeoutError as late:
                raise AskTimedOut(f"{subject}: no answer within {timeout_s:g} s") from late

    async def answer(self, channel: AskChannel[M, A], answerer: Answerer[M, A], **ids: str) -> Subscription:
        side_by_side = asyncio.Semaphore(ASKS_AT_ONCE_MAX)

        async def work(payload: bytes, headers: dict[str, str], subject: str, reply: str) -> None:
            try:
                envelope = Envelope(headers, len(payload))
                made = await make_reply(channel, answerer, payload, subject, envelope, self.frame_budget_bytes)
            except BadMessage as bad:
                count_bad(self.counts, subject, bad)
                made = unreadable(bad)
            except Exception as bug:
                log.exception("the answerer of %s raised: the bus ends", channel.subject)
                self.fail(bug)
                return
            finally:
                side_by_side.release()
            await self._reply(reply, made)

        async def take(payload: bytes, headers: dict[str, str], subject: str, reply: str) -> None:
            await side_by_side.acquire()
            self._spawn(work(payload, headers, subject, reply), f"answer {channel.subject}")

        return await self._listen(filter_of(channel, ids), take, QUEUE_MAX, None)

    async def key_value_store(self, channel: Channel[M], *, ttl_s: float | None) -> KeyValueStore[M]:
        return await NatsKeyValueStore.open(self, self._nc, channel, ttl_s)

    async def flush(self, timeout_s: float) -> None:
        if not self.connected:
            raise BusDown("NATS cannot be reached")
        try:
            await within(timeout_s, self._flush(timeout_s), name="flush")
        except (TimeoutError, nats.errors.Error) as error:
            raise BusDown(f"flush: {error}") from error

    async def _flush(self, timeout_s: float) -> None:
        # nats-py writes the PING past what it still holds back: without this line the PONG would prove nothing.
        await self._nc._flush_pending(force_flush=True)
        await self._nc.flush(timeout_s)  # type: ignore[arg-type]  # nats-py says int and waits any number

    async def close(self) -> None:
        if self._closing:
            return
        if self.connected:
            try:
                await self.flush(GOODBYE_S_MAX)
            except BusDown:
                log.info("NATS went away before everything was sent")
        self._closing = True
        await end(self._tasks)
        try:
            # nats-py waits until the socket has taken what it holds back: for ever if the server does not read.
            await within(GOODBYE_S_MAX, self._nc.close(), name="close the connection to NATS")
        except TimeoutError:
            self._nc.abort()

    async def _reply(self, subject: str, reply: Reply) -> None:
        payload, refused = reply
        try:
            await self._sender.send(subject, payload, {REFUSED_HEADER: "1"} if refused else None, "")
        except BusDown:
            log.info("an answer was not sent: NATS is down")

    async def _listen(
        self, subject: str, take: Take, queue_max: int, on_dropped: Callable[[], None] | None
    ) -> Listening:
        listening = Listening(
            self._nc, take, self.counts, frame_budget_bytes=self.frame_budget_bytes, on_dropped=on_dropped
        )
        try:
            await listening.open(subject, queue_max=queue_max, queue_bytes_max=2 * self.frame_budget_bytes)
        except nats.errors.Error as error:
            raise BusDown(f"subscribe to {subject}: {error!r}") from error
        self._listenings.add(listening)
        await self.flush(SEND_S_MAX)  # The server has read the SUB when it answers the PING.
        return listening

    def _tell(self, handlers: list[Callable[..., None]], *told: str) -> None:
        try:
            for handler in handlers:
                handler(*told)
        except Exception as bug:  # nats-py would take it for a failed reconnection.
            log.exception("a handler of the connection raised: the bus ends")
            self.fail(bug)

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            for listening in self._listenings:
                if listening.nats is error.sub:
                    listening.on_slow()
            return
        self._complaints.hear(error)
        # nats-py calls this after each attempt that failed, and what this raises ends its endless loop of attempts.
        if asyncio.get_running_loop().time() >= self._connect_until:
            raise _TooLate

    async def _on_disconnected(self) -> None:
        if self._closing:
            return
        log.warning("the connection to NATS was lost")
        # nats-py would send what is left after a reconnection, minutes later perhaps: a stale StartLeg does harm.
        self._nc._pending.clear()
        self._nc._pending_data_size = 0
        self._inbox.fail_all(lambda: BusDown("the connection to NATS was lost"))
        self._tell(self.disconnected)

    async def _on_reconnected(self) -> None:
        self.counts.reconnects += 1
        log.warning("reconnected to NATS")
        self._tell(self.reconnected)

    async def _on_closed(self) -> None:
        if not self._closing:
            self.fail(BusDown(f"NATS closed the connection for good: {self._nc.last_error}"))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
