"""Sends payloads, in parts if they exceed the server's limit, in order per subject."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count

import nats.errors
from nats.aio.client import Client

from shared.bus.port import BusDown, MessageTooLarge
from shared.bus.wire import PART_HEADER, PART_MARGIN_BYTES, header_bytes, split


class Sender:
    """The sending side of one connection."""

    def __init__(self, nc: Client, frame_budget_bytes: int, token: str) -> None:
        self._nc = nc
        self._frame_budget_bytes = frame_budget_bytes
        self._locks = SubjectLocks()
        self._token = token
        """Unique to this connection."""
        self._numbers = count()

    async def send(self, subject: str, payload: bytes, headers: Mapping[str, str] | None, reply: str) -> None:
        """Hand one payload to the connection. Raises BusDown, MessageTooLarge."""
        nc = self._nc
        if not nc.is_connected:
            raise BusDown("NATS cannot be reached")
        size = len(payload)
        if size > self._frame_budget_bytes:
            raise MessageTooLarge(f"{size} bytes; at most {self._frame_budget_bytes} travel on the bus")
        try:
            if size + PART_MARGIN_BYTES + header_bytes(headers) > nc.max_payload:
                await self._send_parts(subject, payload, headers, reply)
            elif subject in self._locks:
                async with self._locks.hold(subject):
                    await nc.publish(subject, payload, reply, headers or None)  # type: ignore[arg-type]
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
        async with self._locks.hold(subject):
            for number, (part_header, part) in enumerate(parts, 1):
                if not self._nc.is_connected:
                    raise BusDown("the connection to NATS was lost while a message in parts was sent")
                # Only the last part, which completes the message, makes the server report a missing subscriber.
                part_reply = reply if number == len(parts) else ""
                await self._nc.publish(subject, bytes(part), part_reply, {**(headers or {}), PART_HEADER: part_header})


class _SubjectLock:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0


class SubjectLocks:
    """``subject in locks`` is the cheap check; a sender that finds a lock, or needs one, goes through ``hold``."""

    def __init__(self) -> None:
        self._locks: dict[str, _SubjectLock] = {}

    def __contains__(self, subject: str) -> bool:
        return subject in self._locks

    @asynccontextmanager
    async def hold(self, subject: str) -> AsyncIterator[None]:
        """Be the only sender on the subject; senders take turns in the order of their calls."""
        lock = self._locks.setdefault(subject, _SubjectLock())
        lock.users += 1
        try:
            async with lock.lock:
                yield
        finally:
            lock.users -= 1
            if not lock.users:
                del self._locks[subject]
