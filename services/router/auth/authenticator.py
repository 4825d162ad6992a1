"""Who is asking: API keys at the edge. They are read again when their file changes, and kept when it cannot be read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.router.auth.api_keys import METRICS_PATH, OPEN_PATHS, Key, Keyring, Permission, may_see
from services.router.auth.client import ANYONE, CALLER, ApiClient
from services.router.auth.rate_limit import Over, RateLimit
from services.router.http.errors import HttpError, error_body, failed
from services.router.http.request import Header
from services.router.settings import Settings, is_local, keyring_of, salt_secret_of
from shared.contracts.failures import Reason
from shared.runtime.keys import KEY_CHARS_MAX, digest_of
from shared.runtime.settings import SettingsError

log = logging.getLogger("baton.router")

LOOK_S = 2.0
"""How often the keys' file is looked at."""
BEARER = b"bearer "
NO_FILE = (0, 0, 0)

FileState = tuple[int, int, int]
"""By which a file that was written is told from what it was."""


class Authenticator:
    """Lets in who has a key. ``follow`` keeps the keys as they stand in their file."""

    def __init__(self, settings: Settings, now: Callable[[], float]) -> None:
        self._settings = settings
        self._now = now
        self._metrics_open = settings.metrics == "open" or (settings.metrics == "auto" and is_local(settings))
        self._callers: dict[str, ApiClient] = {}
        self._seen = self._look()
        keyring = keyring_of(settings)
        self.closed = keyring is not None
        """Whether a key is asked for."""
        if keyring is not None:
            self._take(keyring)

    def client(self, headers: list[Header]) -> ApiClient | None:
        """Whose key it is; None: nobody's, or there is none, or there are two. The key itself is kept nowhere, so that
        no worker, log, trace or error can have it.
        """
        if not self.closed:
            return ANYONE
        given: set[bytes] = set()
        for name, value in headers:
            if name == b"x-api-key":
                given.add(value.strip())
            elif name == b"authorization":
                given.add(value[len(BEARER) :].strip() if value[: len(BEARER)].lower() == BEARER else b"")
        if len(given) != 1:
            return None
        key = given.pop()
        return self._callers.get(digest_of(key)) if len(key) <= KEY_CHARS_MAX else None

    def request(self, client: ApiClient | None) -> HttpError | None:
        """Why this one may not have a request served now; None when it may."""
        if client is ANYONE:
            return None
        if client is None:
            return UNKNOWN
        if not client.key.may(Permission.INFER):
            return NOT_FOR_INFERENCE
        over = client.rate_limit.request(self._now())
        return limited(over, client, self._now()) if over is not None else None

    def refusal(self, scope: Any) -> HttpError | None:
        """Why a request that FastAPI would serve is refused; who asks stands in its scope then."""
        client = self.client(scope["headers"])
        scope[CALLER] = client if client is not None else ANYONE
        if scope["path"] in OPEN_PATHS or (self._metrics_open and scope["path"] == METRICS_PATH):
            return None
        if client is None:
            return UNKNOWN
        return None if may_see(client.key, scope["path"], metrics_open=self._metrics_open) else NOT_ADMIN

    async def follow(self, look_s: float = LOOK_S) -> None:
        """SchedulingPass at the file, for ever. What cannot be read changes nothing: those who are known stay so."""
        if not self._settings.keys_file:
            return
        while True:
            await asyncio.sleep(look_s)
            if (state := self._look()) != self._seen:
                self._seen = state
                await self._read_again()

    async def _read_again(self) -> None:
        try:
            keyring = await asyncio.to_thread(keyring_of, self._settings)
            if keyring is not None:
                self._take(keyring)
        except SettingsError as error:
            log.warning("the API keys stay as they were: %s", error)
            return
        log.info("%d API keys are known now", len(self._callers))

    def _take(self, keyring: Keyring) -> None:
        """A key that stays as it was keeps what was used of its limits. Raises SettingsError."""
        secret, now, before = salt_secret_of(self._settings, keyring), self._now(), self._callers
        self._callers = {}
        for digest, key in keyring.keys.items():
            old = before.get(digest)
            rate_limit = old.rate_limit if old is not None and same_limits(old.key, key) else RateLimit(key, now)
            self._callers[digest] = ApiClient(key, secret, rate_limit)

    def _look(self) -> FileState:
        if not self._settings.keys_file:
            return NO_FILE
        try:
            found = Path(self._settings.keys_file).stat()
        except OSError:
            return NO_FILE
        return found.st_mtime_ns, found.st_size, found.st_ino


def same_limits(one: Key, other: Key) -> bool:
    """Whether both may use as much."""
    return (one.requests_per_minute, one.tokens_per_minute) == (other.requests_per_minute, other.tokens_per_minute)


def limited(over: Over, client: ApiClient, now: float) -> HttpError:
    """429: a limit of the key was reached."""
    body = error_body(429, over.message, code="rate_limit_exceeded", kind=over.kind)
    return HttpError(429, body, over.wait_s, "rate_limited", more=tuple(client.told(now)))


def not_allowed(message: str) -> HttpError:
    """403: known, but not for this."""
    return failed(Reason.FORBIDDEN, message)


UNKNOWN = HttpError(
    401,
    error_body(401, "An API key is needed: `Authorization: Bearer KEY`.", code="invalid_api_key"),
    reason="unauthorized",
    more=((b"www-authenticate", b'Bearer realm="baton"'),),
)
NOT_FOR_INFERENCE = not_allowed("This key is not for inference.")
NOT_ADMIN = not_allowed("This takes a key with the permission admin.")
