"""The client of a request, as its API key identifies it."""

from __future__ import annotations

from typing import Final

from services.router.request.rate_limit import Bucket, RateLimit
from shared.contracts.api_keys import NO_KEY, Key
from shared.http.errors import Header

CLIENT_SCOPE_KEY: Final = "baton.client"
"""Key of the client in the ASGI scope of requests that FastAPI serves."""


QUESTIONS_PER_MINUTE: Final = 240
"""Questions about decisions that a client may ask each router."""


class ApiClient:
    """All requests with one key, from its first appearance in the key file until it is revoked."""

    __slots__ = ("charged_tokens", "is_revoked", "key", "label", "questions", "rate_limit", "secret")

    def __init__(self, key: Key, secret: bytes, rate_limit: RateLimit) -> None:
        self.key = key
        self.label = key.label
        self.secret = secret
        """The secret of the tenants' cache salts; empty where no key is needed."""
        self.rate_limit = rate_limit
        self.questions = Bucket(QUESTIONS_PER_MINUTE, 0.0)
        """Questions about decisions that the client may still ask."""
        self.charged_tokens = 0
        """Tokens charged for its running requests."""
        self.is_revoked = False
        """The key is no longer valid for inference: running requests end."""

    def headers(self, now: float) -> list[Header]:
        """Response headers with the client's rate limits; empty for a key without limits."""
        headers: list[Header] = []
        for kind, per_minute, left in self.rate_limit.left(now):
            headers.append((b"x-ratelimit-limit-%b" % kind.encode(), b"%d" % per_minute))
            headers.append((b"x-ratelimit-remaining-%b" % kind.encode(), b"%d" % left))
        return headers


ANYONE: Final = ApiClient(NO_KEY, b"", RateLimit(NO_KEY, 0.0))
"""Every client, where no key is needed."""
