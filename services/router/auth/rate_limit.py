"""What is left of a key's requests and tokens per minute: buckets that may be overdrawn and fill up again."""

from __future__ import annotations

from typing import Literal

import msgspec

from services.router.auth.api_keys import Key

MINUTE_S = 60.0
LEAST = 1.0
"""What must be in a bucket for a request to be let through."""
ROUNDING = 1e-6

Kind = Literal["requests", "tokens"]


class Over(msgspec.Struct, frozen=True):
    """A limit that was reached."""

    kind: Kind
    per_minute: int
    wait_s: float
    """Until there is something again."""

    @property
    def message(self) -> str:
        """For the client."""
        return f"This key may use {self.per_minute} {self.kind} per minute. Try again in {self.wait_s:.1f} s."


class Bucket:
    """Holds what may be used at once, a minute's worth at most; it fills up evenly."""

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """What is in it; below zero when more was taken than there was."""
        if now > self._at:
            filled = self._level + (now - self._at) * self.per_minute / MINUTE_S
            self._level, self._at = min(float(self.per_minute), filled), now
        return self._level

    def wait_s(self, now: float) -> float:
        """Until the next request may pass; 0 when it may."""
        missing = LEAST - self.level(now)
        return missing * MINUTE_S / self.per_minute if missing > ROUNDING else 0.0

    def take(self, now: float, amount: float) -> None:
        """As much as that, whether it is there or not; less than nothing gives back."""
        self._level = min(float(self.per_minute), self.level(now) - amount)


class RateLimit:
    """Of one key, at one router. Tokens are taken when the prompt's length is known and settled when all is known: who
    has used more than there was waits until that has filled up, so a long prompt is never impossible.
    """

    __slots__ = ("_requests", "_tokens")

    def __init__(self, key: Key, now: float) -> None:
        self._requests = Bucket(key.requests_per_minute, now) if key.requests_per_minute else None
        self._tokens = Bucket(key.tokens_per_minute, now) if key.tokens_per_minute else None

    def request(self, now: float) -> Over | None:
        """One more request; why not."""
        if self._tokens is not None and (wait_s := self._tokens.wait_s(now)):
            return Over("tokens", self._tokens.per_minute, wait_s)
        if self._requests is None:
            return None
        if wait_s := self._requests.wait_s(now):
            return Over("requests", self._requests.per_minute, wait_s)
        self._requests.take(now, 1)
        return None

    def tokens(self, now: float, count: int) -> Over | None:
        """So many for its prompt; why not. Others may have come between."""
        if self._tokens is None:
            return None
        if wait_s := self._tokens.wait_s(now):
            return Over("tokens", self._tokens.per_minute, wait_s)
        self._tokens.take(now, count)
        return None

    def settle(self, now: float, charged: int, used: int) -> None:
        """A request for which so many were taken has used so many."""
        if self._tokens is not None and used != charged:
            self._tokens.take(now, used - charged)

    def left(self, now: float) -> list[tuple[Kind, int, int]]:
        """For each limit: what it is, and how much of it may be used at once."""
        buckets: tuple[tuple[Kind, Bucket | None], ...] = (("requests", self._requests), ("tokens", self._tokens))
        return [(kind, one.per_minute, max(0, int(one.level(now)))) for kind, one in buckets if one is not None]


def tokens_used(*, charged: int, prompt: int, completion: int, relayed: int, was_placed: bool) -> int:
    """What a request that is over has cost, as far as anybody knows; -1: nobody. A request that no worker was given
    has cost nothing; one whose client left has cost its prompt and what was relayed.
    """
    if not was_placed:
        return 0
    return (prompt if prompt >= 0 else charged) + (completion if completion >= 0 else relayed)
