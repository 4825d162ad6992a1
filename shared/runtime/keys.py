"""API keys: how one is made, and its digest, which is all that is kept of it.

A key has 256 random bits, so one SHA-256 is enough at rest: nobody can try them all, which is what slow hashes are for.
"""

from __future__ import annotations

import hashlib
import secrets

KEY_PREFIX = "baton-"
"""By which people and programs that look for secrets know one."""
KEY_BYTES = 32
KEY_CHARS_MAX = 256
"""A longer one is nobody's."""


def new_key() -> str:
    """A key that nobody has had."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def new_salt() -> str:
    """A secret from which salts are made."""
    return secrets.token_hex(KEY_BYTES)


def digest_of(key: str | bytes) -> str:
    """What is kept of a key: its SHA-256, in hexadecimal digits.

    Who looks a digest up compares digests, never keys: how long that takes tells nothing of a key that is near.
    """
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()
