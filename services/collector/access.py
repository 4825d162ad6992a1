"""Who may read the console and give orders: holders of a key, or local clients where no keys are configured."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from services.collector.console.orders import OrderClient
from services.collector.settings import Settings
from shared.contracts.api_keys import KEY_CHARS_MAX, Permission, digest_of
from shared.http.edge import AsgiApp
from shared.http.errors import HttpError, error_body
from shared.loopback import is_loopback
from shared.runtime.settings import SettingsError, why_unusable

DIGEST = re.compile(r"[0-9a-f]{64}")
TABLE = re.compile(r"^\[\[key\]\]", re.MULTILINE)
"""Distinguishes a file of API keys from a list of digests."""
KEYS_MAX = 64
KEYS_BYTES_MAX = 32 * 1024 * 1024
BEARER, BASIC = "bearer ", "basic "
OPEN_PATHS = frozenset({"/health", "/ready", "/console/orders"})
"""Orders have a check of their own."""
METRICS_PATH = "/metrics"
NEEDS_A_KEY = HttpError(
    401,
    error_body(401, "This needs an API key with the permission view or admin; in a browser, as the password."),
    reason="unauthorized",
    more=((b"www-authenticate", b'Basic realm="baton"'), (b"www-authenticate", b'Bearer realm="baton"')),
)
"""``Basic`` makes a browser ask for the key, and send it with everything that the page asks for."""
UNREADABLE = HttpError(503, error_body(503, "The key file cannot be read: see the collector's log."), reason="no_keys")


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of one API key that matter here; routers read the rest."""

    sha256: str
    permissions: list[str] = msgspec.field(default_factory=list)


class ApiKeys(msgspec.Struct, frozen=True, kw_only=True):
    """A routers' file of API keys."""

    key: list[ApiKey]


class Access:
    """Looks at the key file for every request, so that changes to it apply at once."""

    def __init__(self, host: str, key_file: str, published_host: str = "") -> None:
        self._on_loopback = is_loopback(host)
        self.is_local = is_loopback(published_host or host)
        """Whether only this machine can connect; ``published_host`` is the address of a container's port."""
        self._key_file = key_file
        self._seen: tuple[int, ...] = ()
        self._permissions: dict[str, frozenset[str]] = {}
        """Permissions by digest, as of the file ``_seen``."""

    @property
    def key_needed(self) -> bool:
        """Whether an admin key is configured."""
        return bool(self._key_file)

    @property
    def possible(self) -> bool:
        """Whether any client may give orders."""
        return self.key_needed or self._on_loopback

    def permissions(self) -> dict[str, frozenset[str]]:
        """What each key permits, by digest. Raises SettingsError when the file cannot be used."""
        if not self._key_file:
            return {}
        try:
            stat = Path(self._key_file).stat()
        except OSError as error:
            raise SettingsError(f"COLLECTOR_ADMIN_KEY_FILE ({self._key_file}; compose: KEYS_FILE): {error}") from error
        seen = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        if seen != self._seen:
            self._permissions, self._seen = read_permissions(self._key_file), seen
        return self._permissions

    def refusal_to_read(self, path: str, headers: Mapping[str, str]) -> HttpError | None:
        """Why this client may not read; None when it may. Local scrapers of metrics need no key, as at routers."""
        if path in OPEN_PATHS or not self.key_needed or (path == METRICS_PATH and self.is_local):
            return None
        key = key_of(headers) or basic_key_of(headers)
        try:
            permitted = self.permissions().get(digest_of(key)) if 0 < len(key) <= KEY_CHARS_MAX else None
        except SettingsError:
            return UNREADABLE
        return NEEDS_A_KEY if permitted is None or permitted.isdisjoint({Permission.VIEW, Permission.ADMIN}) else None

    def client_of(self, headers: Mapping[str, str], *, from_page: bool = False) -> OrderClient:
        """The client that sent these headers. Raises SettingsError when the key file is no longer usable.
        ``from_page``: also the key that a browser adds to every request, so not for orders.
        """
        key = key_of(headers) or (basic_key_of(headers) if from_page else "")
        permissions = self.permissions()
        return OrderClient(
            on_loopback=self._on_loopback,
            names_loopback=is_loopback(_host_of(headers.get("host", ""))),
            key_exists=self.key_needed,
            key_given=bool(key),
            key_matches=0 < len(key) <= KEY_CHARS_MAX and Permission.ADMIN in permissions.get(digest_of(key), ()),
        )


def check(settings: Settings) -> None:
    """Raises SettingsError when other machines could read without a key."""
    access = Access(settings.host, settings.admin_key_file, settings.published_host)
    access.permissions()
    if not (access.is_local or access.key_needed or settings.insecure):
        raise SettingsError(
            f"COLLECTOR_HOST={settings.published_host or settings.host} (compose: CONSOLE_BIND): other machines could "
            "read every tenant's requests at the console, but no keys are configured; set COLLECTOR_ADMIN_KEY_FILE "
            "(compose: KEYS_FILE) to a file of `baton keys new`, or on a trusted network COLLECTOR_INSECURE=true "
            "(compose: INSECURE=true)"
        )


def guarded(app: AsgiApp, access: Access) -> AsgiApp:
    """The app for those who may read it."""

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        refused = None
        if scope["type"] == "http" and access.key_needed:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            refused = await asyncio.to_thread(access.refusal_to_read, scope["path"], headers)
        if refused is None:
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": refused.status, "headers": refused.headers()})
        await send({"type": "http.response.body", "body": refused.body})

    return serve


def key_of(headers: Mapping[str, str]) -> str:
    """The key in the headers that clients set themselves."""
    given = headers.get("authorization", "")
    return given[len(BEARER) :].strip() if given.lower().startswith(BEARER) else headers.get("x-api-key", "")


def basic_key_of(headers: Mapping[str, str]) -> str:
    """The password that a browser has asked for."""
    given = headers.get("authorization", "")
    if not given.lower().startswith(BASIC):
        return ""
    try:
        return base64.b64decode(given[len(BASIC) :]).decode().partition(":")[2]
    except (binascii.Error, ValueError):
        return ""


def read_permissions(path: str) -> dict[str, frozenset[str]]:
    """From a file of API keys, each key's permissions, by its SHA-256; or from a list of digests of admin keys: one a
    line, with ``#`` comments. Raises SettingsError.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(KEYS_BYTES_MAX)
        if TABLE.search(text):
            keys = msgspec.convert(tomllib.loads(text), ApiKeys).key
            return {key.sha256: frozenset(key.permissions) for key in keys}
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"COLLECTOR_ADMIN_KEY_FILE ({path}; compose: KEYS_FILE): {why_unusable(error)}; correct it or unset it"
        ) from error
    lines = [line.partition("#")[0].strip().lower() for line in text.splitlines()]
    digests = [line for line in lines if line]
    if not digests or len(digests) > KEYS_MAX or not all(map(DIGEST.fullmatch, digests)):
        wanted = f"1 to {KEYS_MAX} lines with the SHA-256 of a key each, 64 hexadecimal digits"
        raise SettingsError(f"COLLECTOR_ADMIN_KEY_FILE ({path}) must have {wanted}; `sha256sum` makes them")
    return dict.fromkeys(digests, frozenset({Permission.ADMIN}))


def _host_of(header: str) -> str:
    """The host of ``host:port`` or ``[::1]:port``."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if header.count(":") == 1 else header
