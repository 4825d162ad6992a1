"""An API key as it stands in the routers' file of keys."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

TENANT = re.compile(r"[A-Za-z0-9_-]{1,128}")


class Permission(StrEnum):
    """What a key may be for, as routers read it."""

    INFER = "infer"
    ADMIN = "admin"
    FORCE_PLACEMENT = "force-placement"


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One key, in the order in which it is written; what is not said is left out."""

    tenant: str
    sha256: str
    note: str = ""
    permissions: Sequence[Permission] = ()
    priority: int | None = None
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    models: Sequence[str] = ()
    public_cache: bool = False


def entry_text(entry: KeyEntry) -> str:
    """Its TOML."""
    lines = [f"{name} = {_toml(value)}" for name, value in msgspec.to_builtins(entry).items()]
    return "\n".join(["[[key]]", *lines, ""])


def salt_text(salt: str) -> str:
    """The top of a file of keys."""
    return f'# Of this the tenants\' cache salts are made: the same for all routers.\nsalt = "{salt}"\n'


def _toml(value: Any) -> str:
    return json.dumps(value)  # Of numbers, booleans, strings and lists, JSON is TOML.
