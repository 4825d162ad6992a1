"""Entries of the routers' API key file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from shared.runtime.keys import new_salt

OWNER_ONLY = 0o600

TENANT = re.compile(r"[A-Za-z0-9_-]{1,128}")


class Permission(StrEnum):
    """Permissions of a key, as routers read them."""

    INFER = "infer"
    ADMIN = "admin"
    FORCE_PLACEMENT = "force-placement"


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One key. Fields are written in this order; defaults are omitted."""

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
    """The entry as TOML."""
    lines = [f"{name} = {_toml(value)}" for name, value in msgspec.to_builtins(entry).items()]
    return "\n".join(["[[key]]", *lines, ""])


def salt_text(salt: str) -> str:
    """The first lines of a key file."""
    return (
        f'# The tenants\' cache salts derive from this value: it must be the same for all routers.\nsalt = "{salt}"\n'
    )


def _toml(value: Any) -> str:
    return json.dumps(value)  # For numbers, booleans, strings and lists, JSON is valid TOML.


def add_entry(file: Path, entry: KeyEntry) -> None:
    """Append to the file in place, so that containers that mount it see the change; a new file is for its owner only.
    Raises OSError.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, OWNER_ONLY)
    with os.fdopen(descriptor, "a", encoding="utf-8") as opened:
        top = salt_text(new_salt()) if opened.tell() == 0 else ""
        opened.write(f"{top}\n{entry_text(entry)}")
