"""API keys and their digests; only the digest is stored.

A key has 256 random bits, which cannot be guessed, so a single SHA-256 suffices and no slow hash is needed.
"""

from __future__ import annotations

import hashlib
import secrets

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
