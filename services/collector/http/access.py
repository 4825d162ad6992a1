"""The admin key: required for orders at the console, unless only this machine can reach it."""

from __future__ import annotations

import hmac
import re
import tomllib
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

import msgspec

from services.collector.console.orders import OrderClient
from shared.runtime.keys import KEY_CHARS_MAX, digest_of
from shared.runtime.settings import SettingsError

DIGEST = re.compile(r"[0-9a-f]{64}")
TABLE = re.compile(r"^\[\[key\]\]", re.MULTILINE)
"""Distinguishes a file of API keys from a list of digests."""
ADMIN = "admin"
KEYS_MAX = 64
KEYS_BYTES_MAX = 32 * 1024 * 1024
BEARER = "bearer "


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of one API key that matter here; routers read the rest."""

    sha256: str
    permissions: list[str] = msgspec.field(default_factory=list)


class ApiKeys(msgspec.Struct, frozen=True, kw_only=True):
    """A routers' file of API keys."""

    key: list[ApiKey]


class Access:
    """Reads the key file for every order, so that changes to it apply at once."""

    def __init__(self, host: str, key_file: str) -> None:
        self._on_loopback = is_loopback(host)
        self._key_file = key_file

    @property
    def key_needed(self) -> bool:
        """Whether an admin key is configured."""
        return bool(self._key_file)

    @property
    def possible(self) -> bool:
        """Whether any client may give orders."""
        return self.key_needed or self._on_loopback

    def check(self) -> None:
        """Raises SettingsError when the file cannot be used."""
        if self._key_file:
            read_digests(self._key_file)

    def client_of(self, headers: Mapping[str, str]) -> OrderClient:
        """The client that sent these headers. Raises SettingsError when the key file is no longer usable."""
        given = headers.get("authorization", "")
        key = given[len(BEARER) :].strip() if given.lower().startswith(BEARER) else ""
        digests = read_digests(self._key_file) if self._key_file else []
        return OrderClient(
            on_loopback=self._on_loopback,
            names_loopback=is_loopback(_host_of(headers.get("host", ""))),
            key_exists=self.key_needed,
            key_given=bool(key),
            key_matches=bool(key) and len(key) <= KEY_CHARS_MAX and _is_one_of(digest_of(key), digests),
        )


def read_digests(path: str) -> list[str]:
    """SHA-256 digests of admin keys: one a line, with ``#`` comments; or from a file of API keys, those with the
    permission admin. Raises SettingsError.
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
    """Whether that name reaches this machine only."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _host_of(header: str) -> str:
    """The host of ``host:port`` or ``[::1]:port``."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if header.count(":") == 1 else header


def _is_one_of(digest: str, digests: list[str]) -> bool:
    """Takes the same time for every key."""
    found = False
    for one in digests:
        found |= hmac.compare_digest(digest.encode(), one.encode())
    return found
