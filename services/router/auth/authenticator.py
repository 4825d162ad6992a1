"""Authenticates clients by API key. The keys are read again when their file changes, and kept when it is invalid."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from services.router.auth.api_keys import METRICS_PATH, OPEN_PATHS, Keyring, may_see
from services.router.auth.key_file import keyring_of, salt_secret_of
from services.router.request.client import ANYONE, CLIENT_SCOPE_KEY, ApiClient
from services.router.request.errors import failed
from services.router.request.rate_limit import Over, RateLimit
from services.router.settings import Settings
from services.router.usage import Budgets
from shared.contracts.api_keys import KEY_CHARS_MAX, Key, Permission, digest_of
from shared.contracts.failures import Reason
from shared.http.errors import Header, HttpError, error_body
from shared.runtime.settings import CHECK_S, FollowedFile

log = logging.getLogger("baton.router")

BEARER: Final = b"bearer "
KEY_HEADERS: Final = frozenset({b"x-api-key", b"api-key"})
"""Headers with a key besides ``Authorization: Bearer KEY``: Anthropic's clients send the first, Azure's the second."""

KeysAndSecret = tuple[Keyring, bytes] | None
"""The API keys and the secret of their tenants' salts; None where no key is needed."""


class Authenticator:
    """Finds the client of a request and checks its permissions. ``follow`` keeps the keys current."""

    def __init__(self, settings: Settings, now: Callable[[], float], budgets: Budgets) -> None:
        self._settings = settings
        self._budgets = budgets
        self._now = now
        self._metrics_open = settings.metrics == "open" or (settings.metrics == "auto" and settings.is_local)
        self._clients: dict[str, ApiClient] = {}
        self._keys = FollowedFile(settings.keys_file, self._read, what="the API keys", log=log)
        self.closed = self._keys.value is not None
        """Whether a key is needed."""
        self._replace_keys(self._keys.value)

    @property
    def failure(self) -> str:
        """Why the key file cannot be used now; empty while it can. The last valid keys are in force."""
        return self._keys.failure

    def client(self, headers: list[Header]) -> ApiClient | None:
        """The client whose key the headers have; other keys beside it, which some clients send to every server, count
        for nothing. None: no key, no known one, or those of two clients (``unknown`` says which). The key itself is
        never stored, so that it cannot reach a worker, log, trace or error.
        """
        if not self.closed:
            return ANYONE
        known = self._known(headers)
        return known[0] if len(known) == 1 else None

    def unknown(self, headers: list[Header]) -> HttpError:
        """The error for headers of which ``client`` is None."""
        return TWO_KEYS if len(self._known(headers)) > 1 else UNKNOWN

    def _known(self, headers: list[Header]) -> list[ApiClient]:
        """The clients whose keys the headers have."""
        given: set[bytes] = set()
        for name, value in headers:
            if name in KEY_HEADERS:
                given.add(value.strip())
            elif name == b"authorization" and value[: len(BEARER)].lower() == BEARER:
                given.add(value[len(BEARER) :].strip())
        known: list[ApiClient] = []
        for key in given:
            client = self._clients.get(digest_of(key)) if len(key) <= KEY_CHARS_MAX else None
            if client is not None:
                known.append(client)
        return known

    def owner(self, digest: str) -> ApiClient | None:
        """The client of the key with this SHA-256, of a request that was taken earlier; None if it is revoked."""
        if not self.closed:
            return ANYONE
        client = self._clients.get(digest)
        return client if client is not None and client.key.may(Permission.INFER) else None

    def request(self, client: ApiClient | None) -> HttpError | None:
        """Why this client may not have a request served now; None when it may. Counts the request."""
        if client is ANYONE:
            return None
        if client is None:
            return UNKNOWN
        if not client.key.may(Permission.INFER):
            return NOT_FOR_INFERENCE
        if (spent := self._budgets.refusal(client)) is not None:
            return spent
        over = client.rate_limit.request(self._now())
        return limited(over, client, self._now()) if over is not None else None

    def refusal(self, scope: Any) -> HttpError | None:
        """Why a request to FastAPI is refused; None when it is not. Puts the client into its scope."""
        client = self.client(scope["headers"])
        scope[CLIENT_SCOPE_KEY] = client if client is not None else ANYONE
        if scope["path"] in OPEN_PATHS or (self._metrics_open and scope["path"] == METRICS_PATH):
            return None
        if client is None:
            return self.unknown(scope["headers"])
        return None if may_see(client.key, scope["path"], metrics_open=self._metrics_open) else NOT_TO_SEE

    async def follow(self, check_s: float = CHECK_S) -> None:
        """Check the file until cancelled. An invalid file changes nothing."""
        if self._settings.keys_file:
            await self._keys.follow(self._replace_keys, check_s)

    def _read(self) -> KeysAndSecret:
        """Raises SettingsError."""
        keyring = keyring_of(self._settings)
        return None if keyring is None else (keyring, salt_secret_of(self._settings, keyring))

    def _replace_keys(self, found: KeysAndSecret) -> None:
        """A key that remains keeps its client, which running requests refer to, and unless its limits have changed also
        the levels of its buckets. The clients of all others are revoked.
        """
        if found is None:
            return
        keyring, secret = found
        self._budgets.keys_changed(keyring.keys.values())
        before, self._clients = self._clients, {}
        for digest, key in keyring.keys.items():
            client = before.get(digest) or ApiClient(key, secret, RateLimit(key, self._now()))
            if not same_limits(client.key, key):
                client.rate_limit = RateLimit(key, self._now())
            client.key, client.label, client.secret = key, key.label, secret
            client.is_revoked = not key.may(Permission.INFER)
            self._clients[digest] = client
        for digest, client in before.items():
            client.is_revoked |= digest not in self._clients


def same_limits(one: Key, other: Key) -> bool:
    return all(
        getattr(one, name) == getattr(other, name)
        for name in ("requests_per_minute", "tokens_per_minute", "sequences_max")
    )


def refusal_of(client: ApiClient, now: float) -> HttpError | None:
    """Why this client's request to a route of FastAPI that needs the permission to have requests served gets no answer,
    whatever it asks for; None when it does. Counts the request.
    """
    if client is ANYONE:
        return None
    if not client.key.may(Permission.INFER):
        return NOT_FOR_INFERENCE
    over = client.rate_limit.request(now)
    return limited(over, client, now) if over is not None else None


def limited(over: Over, client: ApiClient, now: float) -> HttpError:
    """429: a rate limit of the key was reached."""
    body = error_body(429, over.message, code="rate_limit_exceeded", kind=over.kind)
    return HttpError(429, body, over.wait_s, "rate_limited", more=tuple(client.headers(now)))


def not_allowed(message: str) -> HttpError:
    """403: the key is valid but does not permit this."""
    return failed(Reason.FORBIDDEN, message)


UNKNOWN: Final = HttpError(
    401,
    error_body(401, "An API key that is known here is needed: `Authorization: Bearer KEY`.", code="invalid_api_key"),
    reason="unauthorized",
    more=((b"www-authenticate", b'Bearer realm="baton"'),),
)
TWO_KEYS: Final = HttpError(
    401,
    error_body(401, "The request has the API keys of two clients in its headers: send one.", code="invalid_api_key"),
    reason="unauthorized",
    more=UNKNOWN.more,
)
NOT_FOR_INFERENCE: Final = not_allowed("This key does not permit inference.")
NOT_TO_SEE: Final = not_allowed("This needs a key with the permission view or admin.")
