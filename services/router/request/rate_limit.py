"""Limits of requests and tokens per minute for each key: token buckets that may be overdrawn."""

from __future__ import annotations

from typing import Final, Literal

from shared.contracts.api_keys import Key

MINUTE_S: Final = 60.0
LEAST: Final = 1.0
"""The bucket level that a request needs."""
ROUNDING: Final = 1e-6

REQUEST_END_S: Final = 1.0
"""Retry-After where a request of the key must end first: when, is not known."""

Kind = Literal["requests", "tokens", "sequences"]


class Over:
    """A limit that was reached."""

    def __init__(self, kind: Kind, per_minute: int, wait_s: float) -> None:
        self.kind: Kind = kind
        self.per_minute = per_minute
        """The limit in one minute; of sequences, at once."""
        self.wait_s = wait_s
        """Seconds until a request may pass again."""

    @property
    def message(self) -> str:
        """The message for the client."""
        if self.kind == "sequences":
            return f"This key may have {self.per_minute} sequences served at once. Try again when others have ended."
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

    A request with several sequences (completions, or inputs of a batch) counts as that many requests. Tokens are taken
    when the prompt's length is known, with an estimate of the completions, and corrected when the request ends. The
    bucket may be overdrawn: a prompt longer than a minute's worth is served, and the key waits afterwards.
    """

    __slots__ = ("_requests", "_sequences", "_sequences_max", "_tokens")

    def __init__(self, key: Key, now: float) -> None:
        self._sequences = 0
        self._sequences_max = key.sequences_max
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

    def admit(self, now: float, *, sequences: int, tokens: int) -> Over | None:
        """Take what the request that ``request`` counted as one needs, now that its body is known; or return the limit
        that is reached. After None, ``leave`` must follow.
        """
        if self._tokens is not None and (wait_s := self._tokens.wait_s(now)):
            return Over("tokens", self._tokens.per_minute, wait_s)
        if 0 < self._sequences_max < self._sequences + sequences:
            return Over("sequences", self._sequences_max, REQUEST_END_S)
        self._sequences += sequences
        if self._requests is not None and sequences > 1:
            self._requests.take(now, sequences - 1)
        if self._tokens is not None:
            self._tokens.take(now, tokens)
        return None

    def leave(self, sequences: int) -> None:
        """A request that was admitted has ended."""
        self._sequences -= sequences

    def settle(self, now: float, charged: int, used: int) -> None:
        """A request has ended: ``charged`` tokens were taken for it, ``used`` were used."""
        if self._tokens is not None and used != charged:
            self._tokens.take(now, used - charged)

    def left(self, now: float) -> list[tuple[Kind, int, int]]:
        """Each limit's kind, its amount per minute, and how much may be used now."""
        buckets: tuple[tuple[Kind, Bucket | None], ...] = (("requests", self._requests), ("tokens", self._tokens))
        return [(kind, one.per_minute, max(0, int(one.level(now)))) for kind, one in buckets if one is not None]


def tokens_used(*, prompt_charged: int, prompt: int, completion: int, relayed: int, unseen: int) -> tuple[int, int]:
    """Prompt and completion tokens that a finished request has used. Without a report the charge stays: leaving must
    not be cheaper than waiting.

    ``prompt_charged``: the prompt as the router counted or estimated it. ``prompt`` and ``completion`` as the engine
    reports them; 0 or less, and -1: not reported. ``relayed``: generated tokens that the client was sent; ``unseen``:
    those that the engine may have generated for a client that left before its response.
    """
    used = prompt if prompt > 0 else prompt_charged
    return used, completion if completion >= 0 else max(relayed, unseen)
