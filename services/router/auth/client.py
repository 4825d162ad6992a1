"""Whoever has a request served, with what their key allows."""

from __future__ import annotations

from services.router.auth.api_keys import NO_KEY, Key
from services.router.auth.rate_limit import RateLimit

Header = tuple[bytes, bytes]

CALLER = "baton.client"
"""Where a request that FastAPI serves finds who asks."""


class ApiClient:
    """Whoever asks with one key, for as long as the key is there."""

    __slots__ = ("key", "rate_limit", "secret")

    def __init__(self, key: Key, secret: bytes, rate_limit: RateLimit) -> None:
        self.key = key
        self.secret = secret
        """Of which salts are made; empty where nobody is kept apart."""
        self.rate_limit = rate_limit

    def told(self, now: float) -> list[Header]:
        """What the client is told of its limits; most keys have none."""
        headers: list[Header] = []
        for kind, per_minute, left in self.rate_limit.left(now):
            headers.append((b"x-ratelimit-limit-%b" % kind.encode(), b"%d" % per_minute))
            headers.append((b"x-ratelimit-remaining-%b" % kind.encode(), b"%d" % left))
        return headers


ANYONE = ApiClient(NO_KEY, b"", RateLimit(NO_KEY, 0.0))
"""Everybody, where no keys are asked for."""
