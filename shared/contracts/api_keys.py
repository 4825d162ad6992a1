"""API keys, their digests, and entries of the key file: `baton keys` writes them, routers and the collector read them.

Only the digest is stored. A key has 256 random bits, which cannot be guessed, so a single SHA-256 suffices and no slow
hash is needed.
"""

from __future__ import annotations

import hashlib
import secrets
from enum import StrEnum

import msgspec

LABEL_CHARS = 12


class Permission(StrEnum):
    """What a key permits, at routers and at the metrics collector."""

    INFER = "infer"
    """Inference requests."""
    VIEW = "view"
    """Reading what operators see: metrics, the console and the decisions of all tenants."""
    ADMIN = "admin"
    """Reading what operators see, and orders at the console."""
    FORCE_PLACEMENT = "force-placement"
    """Choosing workers and KV sources in a body."""


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One ``[[key]]`` of the operator's file."""

    sha256: str = ""
    """SHA-256 of the key; the key itself is not stored."""
    tenant: str = ""
    """The tenant of its requests; overrides the header."""
    name: str = ""
    """Name in the usage ledger; empty: the beginning of ``sha256``. No two keys of one file have the same."""
    note: str = ""
    """Remark for the operator; not used."""
    permissions: frozenset[Permission] = frozenset({Permission.INFER})
    priority: int | None = None
    """The priority of its requests, and the most urgent that they may ask for; None: the router's defaults."""
    requests_per_minute: int = 0
    """Limit at each router; 0: no limit."""
    tokens_per_minute: int = 0
    """Prompt and completion tokens together, at each router; 0: no limit."""
    monthly_tokens: int = 0
    """Budget for each calendar month in UTC, of prompt and completion tokens at all routers; 0: none."""
    sequences_max: int = 0
    """Sequences (completions, or inputs of a batch) of its requests that each router serves at once; 0: no limit."""
    models: frozenset[str] = frozenset()
    """Models that it may use; empty: all."""
    public_cache: bool = False
    """Whether the key's prompts are not secret: they share cached KV with those of all keys that have this set."""

    @property
    def label(self) -> str:
        """Names it in the usage ledger. The key cannot be computed from it."""
        return self.name or self.sha256[:LABEL_CHARS]

    def may(self, permission: Permission) -> bool:
        return permission in self.permissions

    @property
    def sees_all(self) -> bool:
        """Whether it may read what operators see."""
        return not self.permissions.isdisjoint({Permission.VIEW, Permission.ADMIN})


NO_KEY = Key(permissions=frozenset({Permission.INFER, Permission.ADMIN}))
"""The key of every client where none is required."""

KEY_PREFIX = "baton-"
"""Lets secret scanners recognise a key."""
KEY_BYTES = 32
KEY_CHARS_MAX = 256
"""Longer strings are rejected."""


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def new_salt() -> str:
    return secrets.token_hex(KEY_BYTES)


def digest_of(key: str | bytes) -> str:
    """The SHA-256 of a key, in hexadecimal digits.

    Look-ups compare digests, so their duration reveals nothing about similar keys.
    """
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()
