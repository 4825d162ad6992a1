"""What the holder of an API key may: for which tenant, how urgently, how much, with which models."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

import msgspec

from services.router.placement.slo import PRIORITY_MAX, PRIORITY_MIN, is_priority
from shared.contracts.ids import is_subject_token

DIGEST = re.compile(r"[0-9a-f]{64}")
KEYS_MAX = 100_000
SALT_CHARS_MIN = 32
PER_MINUTE_MAX = 1 << 40

OPEN_PATHS = frozenset({"/health", "/ready", "/docs", "/redoc", "/openapi.json"})
"""Asked by whoever watches the process, or the same for everybody; whoever is not known is told no more."""
METRICS_PATH = "/metrics"


class Permission(StrEnum):
    """What a key may be for."""

    INFER = "infer"
    """To have requests served."""
    ADMIN = "admin"
    """To see what the router knows of all tenants."""
    FORCE_PLACEMENT = "force-placement"
    """To choose workers and sources in a body."""


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One API key, as the operator wrote it down."""

    sha256: str = ""
    """Of the key; the key itself is nowhere."""
    tenant: str = ""
    """Whoever asks with it, whatever its header says."""
    note: str = ""
    """For the operator's eyes."""
    permissions: frozenset[Permission] = frozenset({Permission.INFER})
    priority: int | None = None
    """Of its requests, and the most urgent that they may ask for; None: as for requests without a key."""
    requests_per_minute: int = 0
    """At each router; 0: as many as it likes."""
    tokens_per_minute: int = 0
    """Of prompts and completions together, at each router; 0: as many as it likes."""
    models: frozenset[str] = frozenset()
    """It may use; empty: all of them."""
    public_cache: bool = False
    """Its prompts are no secret: they share cached KV with those of all other such keys, and take the same time."""

    def may(self, permission: Permission) -> bool:
        """Whether it is for that."""
        return permission in self.permissions


NO_KEY = Key(permissions=frozenset({Permission.INFER, Permission.ADMIN}))
"""What everybody has where no keys are asked for."""


class Keyring(msgspec.Struct, frozen=True, kw_only=True):
    """All keys that there are."""

    keys: dict[str, Key] = msgspec.field(default_factory=dict)
    """By digest."""
    salt: str = ""
    """Of which each tenant's salt is made; empty: it stands elsewhere."""


class _Written(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: list[Key] = msgspec.field(default_factory=list)
    salt: str = ""


def read_keys(said: dict[str, Any]) -> Keyring:
    """Keys from the operator's TOML. Raises ValueError in words for the operator."""
    try:
        written = msgspec.convert(said, _Written)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    if not written.key:
        raise ValueError("there is no [[key]]; make one with `baton keys new`")
    if len(written.key) > KEYS_MAX:
        raise ValueError(f"there are {len(written.key)} keys, {KEYS_MAX} at most can be")
    if written.salt and len(written.salt) < SALT_CHARS_MIN:
        raise ValueError(f"salt has {len(written.salt)} characters; it must have {SALT_CHARS_MIN} random ones or more")
    keys: dict[str, Key] = {}
    for number, key in enumerate(written.key, 1):
        if wrong := _fault(key) or ("it stands there twice" if key.sha256 in keys else ""):
            raise ValueError(f"[[key]] number {number} (tenant {key.tenant[:64]!r}): {wrong}")
        keys[key.sha256] = key
    return Keyring(keys=keys, salt=written.salt)


def may_see(key: Key, path: str, *, metrics_open: bool) -> bool:
    """Whether it may ask for what is no inference."""
    return path != METRICS_PATH or metrics_open or key.may(Permission.ADMIN)


def _fault(key: Key) -> str:
    if not DIGEST.fullmatch(key.sha256):
        return "sha256 must be the key's SHA-256 in 64 hexadecimal digits"
    if not key.tenant or not is_subject_token(key.tenant):
        return "tenant must be up to 128 letters, digits, underscores and hyphens"
    if not key.permissions:
        return f"permissions must be some of {', '.join(Permission)}"
    if key.priority is not None and not is_priority(key.priority):
        return f"priority must be {PRIORITY_MIN} to {PRIORITY_MAX}"
    for name in ("requests_per_minute", "tokens_per_minute"):
        if not 0 <= getattr(key, name) <= PER_MINUTE_MAX:
            return f"{name} must be a positive number, or 0 for no limit"
    return ""
