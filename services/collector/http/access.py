"""The admin key: what whoever wants to act at the console must have, where more than this machine can reach it."""

from __future__ import annotations

import hmac
import re
import tomllib
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

import msgspec

from services.collector.console.orders import Standing
from shared.runtime.keys import KEY_CHARS_MAX, digest_of
from shared.runtime.settings import SettingsError

DIGEST = re.compile(r"[0-9a-f]{64}")
TABLE = re.compile(r"^\[\[key\]\]", re.MULTILINE)
"""By which a file of API keys is told from a list of digests."""
ADMIN = "admin"
KEYS_MAX = 64
KEYS_BYTES_MAX = 32 * 1024 * 1024
BEARER = "bearer "


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """What matters here of one; the rest is for routers."""

    sha256: str
    permissions: list[str] = msgspec.field(default_factory=list)


class ApiKeys(msgspec.Struct, frozen=True, kw_only=True):
    """All of them."""

    key: list[ApiKey]


class Access:
    """Looks keys up in their file, whenever one is needed: what is written there counts at once."""

    def __init__(self, host: str, key_file: str) -> None:
        self._on_loopback = is_loopback(host)
        self._key_file = key_file

    @property
    def key_needed(self) -> bool:
        """Whether there is an admin key."""
        return bool(self._key_file)

    @property
    def possible(self) -> bool:
        """Whether anybody at all may act."""
        return self.key_needed or self._on_loopback

    def check(self) -> None:
        """Raises SettingsError when the file cannot be used."""
        if self._key_file:
            read_digests(self._key_file)

    def standing(self, headers: Mapping[str, str]) -> Standing:
        """Of whoever sent these. Raises SettingsError when the file cannot be used any more."""
        given = headers.get("authorization", "")
        key = given[len(BEARER) :].strip() if given.lower().startswith(BEARER) else ""
        digests = read_digests(self._key_file) if self._key_file else []
        return Standing(
            on_loopback=self._on_loopback,
            names_loopback=is_loopback(_host_of(headers.get("host", ""))),
            key_exists=self.key_needed,
            key_given=bool(key),
            key_fits=bool(key) and len(key) <= KEY_CHARS_MAX and _is_one_of(digest_of(key), digests),
        )


def read_digests(path: str) -> list[str]:
    """SHA-256 digests of admin keys: one a line, where ``#`` begins a comment; or of a file of API keys, those with the
    permission. Raises SettingsError.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(KEYS_BYTES_MAX)
        if TABLE.search(text):
            return [key.sha256 for key in msgspec.convert(tomllib.loads(text), ApiKeys).key if ADMIN in key.permissions]
    except (OSError, ValueError) as error:
        raise SettingsError(f"COLLECTOR_ADMIN_KEY_FILE ({path}): {error}; correct it or unset it") from error
    lines = [line.partition("#")[0].strip().lower() for line in text.splitlines()]
    digests = [line for line in lines if line]
    if not digests or len(digests) > KEYS_MAX or not all(map(DIGEST.fullmatch, digests)):
        wanted = f"1 to {KEYS_MAX} lines with the SHA-256 of a key each, 64 hexadecimal digits"
        raise SettingsError(f"COLLECTOR_ADMIN_KEY_FILE ({path}) must have {wanted}; `sha256sum` makes them")
    return digests


def is_loopback(host: str) -> bool:
    """Whether only this machine is reached by that name."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _host_of(header: str) -> str:
    """Of ``host:port`` or ``[::1]:port``, the host."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if header.count(":") == 1 else header


def _is_one_of(digest: str, digests: list[str]) -> bool:
    """In the same time whichever it is."""
    found = False
    for one in digests:
        found |= hmac.compare_digest(digest.encode(), one.encode())
    return found
