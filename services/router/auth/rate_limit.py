"""Limits of requests and tokens per minute for each key: token buckets that may be overdrawn."""

from __future__ import annotations

from typing import Literal

import msgspec

from services.router.auth.api_keys import Key

MINUTE_S = 60.0
LEAST = 1.0
"""The bucket level that a request needs."""
ROUNDING = 1e-6

Kind = Literal["requests", "tokens"]


class Over(msgspec.Struct, frozen=True):
    """A limit that was reached."""

    kind: Kind
    per_minute: int
    wait_s: float
    """Until a request may pass again."""

    @property
    def message(self) -> str:
        """The message for the client."""
        return f"This key may use {self.per_minute} {self.kind} per minute. Try again in {self.wait_s:.1f} s."


class Bucket:
    """Holds what may be used at once, at most one minute's worth; it refills evenly."""

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """The present level; below zero when it is overdrawn."""
        if now > self._at:
            filled = self._level + (now - self._at) * self.per_minute / MINUTE_S
            self._level, self._at = min(float(self.per_minute), filled), now
        return self._level

    def wait_s(self, now: float) -> float:
        """Until the next request may pass; 0 when it may."""
        missing = LEAST - self.level(now)
        return missing * MINUTE_S / self.per_minute if missing > ROUNDING else 0.0

    def take(self, now: float, amount: float) -> None:
        """Take ``amount`` even if the level is lower; a negative amount gives back."""
        self._level = min(float(self.per_minute), self.level(now) - amount)


class RateLimit:
    """The limits of one key at one router.

    Tokens are taken when the prompt's length is known and corrected when the request ends. The bucket may be overdrawn:
    a prompt longer than a minute's worth is served, and the key waits afterwards.
    """

    __slots__ = ("_requests", "_tokens")

    def __init__(self, key: Key, now: float) -> None:
        self._requests = Bucket(key.requests_per_minute, now) if key.requests_per_minute else None
        self._tokens = Bucket(key.tokens_per_minute, now) if key.tokens_per_minute else None

    def request(self, now: float) -> Over | None:
        """Take one request, or return the limit that is reached."""
        if self._tokens is not None and (wait_s := self._tokens.wait_s(now)):
            return Over("tokens", self._tokens.per_minute, wait_s)
        if self._requests is None:
            return None
        if wait_s := self._requests.wait_s(now):
            return Over("requests", self._requests.per_minute, wait_s)
        self._requests.take(now, 1)
        return None

    def tokens(self, now: float, count: int) -> Over | None:
        """Take a prompt's tokens, or return the limit that is reached (other requests may have taken tokens since
        ``request``).
        """
        if self._tokens is None:
            return None
        if wait_s := self._tokens.wait_s(now):
            return Over("tokens", self._tokens.per_minute, wait_s)
        self._tokens.take(now, count)
        return None

    def settle(self, now: float, charged: int, used: int) -> None:
        """A request has ended: ``charged`` tokens were taken for it, ``used`` were used."""
        if self._tokens is not None and used != charged:
            self._tokens.take(now, used - charged)

    def left(self, now: float) -> list[tuple[Kind, int, int]]:
        """Each limit's kind, its amount per minute, and how much may be used now."""
        buckets: tuple[tuple[Kind, Bucket | None], ...] = (("requests", self._requests), ("tokens", self._tokens))
        return [(kind, one.per_minute, max(0, int(one.level(now)))) for kind, one in buckets if one is not None]


def tokens_used(*, charged: int, prompt: int, completion: int, relayed: int, was_placed: bool) -> int:
    """Tokens that a finished request has used. ``prompt`` and ``completion`` are -1 when not reported. A request that
    was never placed has used nothing; one whose client left has used its prompt and what was relayed.
    """
    if not was_placed:
        return 0
    return (prompt if prompt >= 0 else charged) + (completion if completion >= 0 else relayed)
