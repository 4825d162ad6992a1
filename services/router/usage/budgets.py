"""Budgets of API keys for a calendar month in UTC.

A key has used what the ledger has of it, what this router's requests have used since, and what its running requests
here are charged. Requests at other routers count when these have reported them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from services.router.auth.client import ApiClient
from services.router.usage.unstored import Spender, UnstoredUsage
from shared.bus.port import Bus, StoredValue, watch_store
from shared.contracts.api_keys import Key
from shared.contracts.channels import USAGE
from shared.contracts.usage import UsageMonth
from shared.http.errors import HttpError, error_body
from shared.runtime.clock import Clock

log = logging.getLogger("baton.router")

UNREAD_S_MAX = 10.0
"""An operator is told when the ledger is unread for so long."""
INSUFFICIENT_QUOTA = "insufficient_quota"
NO_RETRY = (b"x-should-retry", b"false")
"""Read by the clients of OpenAI and Anthropic, which would try a 429 again at once."""


class Budgets:
    """The month's spending of keys with a budget. ``follow`` keeps it current, once a key has one."""

    def __init__(self, bus: Bus, clock: Clock, unstored: UnstoredUsage) -> None:
        self._bus = bus
        self._clock = clock
        self._unstored = unstored
        self._wanted = asyncio.Event()
        self._unread_since = clock.now()
        self._is_read = False
        self._entries: dict[str, tuple[Spender, int]] = {}
        """By entry of the ledger, of this month and later ones: who spent how many tokens."""
        self._spent: dict[Spender, int] = {}
        self._newest_month = self._month()

    def keys_changed(self, keys: Iterable[Key]) -> None:
        """These keys are in force now."""
        wanted = any(key.monthly_tokens for key in keys)
        if wanted and not self._wanted.is_set():
            self._unread_since = self._clock.now()
            self._wanted.set()
        elif not wanted:
            self._wanted.clear()

    def refusal(self, client: ApiClient) -> HttpError | None:
        """429 when the client's key has used its budget; else None."""
        key = client.key
        if not key.monthly_tokens:
            return None
        today = datetime.fromtimestamp(self._clock.wall_ms() / 1000, UTC)
        spender = Spender(f"{today:%Y-%m}", key.tenant, key.label)
        used = self._spent.get(spender, 0) + self._unstored.tokens_of(spender) + client.charged_tokens
        return over_budget(key, used, today) if used >= key.monthly_tokens else None

    @property
    def failure(self) -> str:
        """What an operator must correct; empty when there is nothing."""
        if self._is_read or not self._wanted.is_set() or self._clock.now() - self._unread_since < UNREAD_S_MAX:
            return ""
        return "the usage ledger cannot be read: monthly budgets count only what this router has served"

    async def follow(self) -> None:
        """Watch the ledger until cancelled."""
        await self._wanted.wait()
        async for entry in watch_store(self._bus, USAGE):
            if entry is None:
                self._is_read = True
            else:
                self._heard(entry)

    def _heard(self, entry: StoredValue[UsageMonth]) -> None:
        self._forget(entry.key)
        month = self._month()
        if month != self._newest_month:
            self._newest_month = month
            for name in [name for name, (spender, _tokens) in self._entries.items() if spender.month < month]:
                self._forget(name)
        value = entry.value
        if value is not None and value.month >= month:
            spender, tokens = Spender(value.month, value.tenant, value.key), value.total.tokens
            self._entries[entry.key] = (spender, tokens)
            self._spent[spender] = self._spent.get(spender, 0) + tokens

    def _forget(self, name: str) -> None:
        spender, tokens = self._entries.pop(name, (None, 0))
        if spender is not None:
            left = self._spent.pop(spender, 0) - tokens
            if left > 0:
                self._spent[spender] = left

    def _month(self) -> str:
        return f"{datetime.fromtimestamp(self._clock.wall_ms() / 1000, UTC):%Y-%m}"


def over_budget(key: Key, used: int, today: datetime) -> HttpError:
    """429 in OpenAI's form for a budget that is spent."""
    renewed = (today.replace(day=1) + timedelta(days=31)).replace(day=1).date()
    message = (
        f"This key has used its budget: {used:,} of {key.monthly_tokens:,} tokens in {today:%Y-%m}, running requests "
        f"included. The next budget begins on {renewed} at 00:00 UTC."
    )
    body = error_body(429, message, code=INSUFFICIENT_QUOTA, kind=INSUFFICIENT_QUOTA)
    return HttpError(429, body, reason="over_budget", more=(NO_RETRY,))
