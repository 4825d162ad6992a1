"""A subscription of nats-py as ours: parts are put together, what is dropped is counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from shared.bus.port import BusCounts
from shared.bus.receiver import count_bad
from shared.bus.wire import PART_HEADER, Assembler, BadMessage

log = logging.getLogger("baton.bus")

Take = Callable[[bytes, dict[str, str], Msg], Awaitable[None]]
"""Whole payload, headers, and the (last) message that brought it."""

HELD_BUDGETS_MAX = 4
"""Half-built messages of one subscription hold at most this many times the frame budget."""

_NO_HEADERS: dict[str, str] = {}


class Listening:
    """One live subscription."""

    def __init__(
        self, take: Take, counts: BusCounts, frame_budget_bytes: int, on_dropped: Callable[[], None] | None
    ) -> None:
        self.dropped = 0
        self.nats: NatsSubscription | None = None
        self._take = take
        self._counts = counts
        self._on_dropped = on_dropped
        self._assembler = Assembler(
            message_bytes_max=frame_budget_bytes, held_bytes_max=HELD_BUDGETS_MAX * frame_budget_bytes
        )

    async def on_message(self, msg: Msg) -> None:
        """nats-py awaits this for one message after the other."""
        headers = msg.headers
        if headers is None:
            await self._take(msg.data, _NO_HEADERS, msg)
            return
        part = headers.pop(PART_HEADER, None)
        if part is None:
            await self._take(msg.data, headers, msg)
            return
        payload = self._put_together(part, msg)
        if payload is not None:
            await self._take(payload, headers, msg)

    def on_slow(self) -> None:
        """nats-py threw a message away because the queue was full."""
        self.dropped += 1
        self._counts.dropped += 1
        if self._on_dropped is not None:
            self._on_dropped()

    async def close(self) -> None:
        """Stop; messages not yet handled are discarded."""
        subscription, self.nats = self.nats, None
        if subscription is None:
            return
        try:
            await subscription.unsubscribe()
        except nats.errors.Error as error:  # The connection is closed or was never whole: nothing to stop.
            log.debug("unsubscribe: %r", error)

    def _put_together(self, part: str, msg: Msg) -> bytes | None:
        lost = self._assembler.lost
        try:
            return self._assembler.add(part, msg.data, asyncio.get_running_loop().time())
        except BadMessage as bad:
            count_bad(self._counts, msg.subject, bad)
            return None
        finally:
            self._counts.parts_lost += self._assembler.lost - lost
