"""The text with which a host joins a fleet: where NATS is, its CA, what the host runs, and a key for each worker.

``baton1.PAYLOAD.CHECK``: base64url of compressed JSON, and the first digits of its SHA-256. The check finds what was
cut off or mistyped; it is no signature, and the text is as secret as the keys in it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import zlib
from collections.abc import Mapping

import msgspec

from services.launcher.fleet.host_part import HostPart, unusable_variable
from services.launcher.system.worker_plan import worker_names
from shared.contracts.ids import is_subject_token

VERSION = 1
PREFIX = "baton"
CHECK_CHARS = 12
BYTES_MAX = 1 << 20
"""Of the JSON; more is refused before it is unpacked."""
FORM = re.compile(rf"{PREFIX}(\d+)\.([A-Za-z0-9_-]+)\.([0-9a-f]+)")


class WrongToken(Exception):
    """The text is no token that this version can use; the message says what is wrong with it."""


class Token(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a token carries."""

    nats_urls: tuple[str, ...]
    """The same NATS at each address by which other hosts may reach it."""
    ca: str
    """PEM of the CA that signed NATS's certificate."""
    seeds: Mapping[str, str]
    """An nkey seed for each worker id. Such a key permits what one worker does, and nothing else."""
    part: HostPart

    def __repr__(self) -> str:
        return f"Token(part={self.part!r}, nats_urls={self.nats_urls!r})"


def write_token(token: Token) -> str:
    """The text."""
    payload = base64.urlsafe_b64encode(zlib.compress(msgspec.json.encode(token), 9)).decode().rstrip("=")
    return f"{PREFIX}{VERSION}.{payload}.{_check_of(payload)}"


def looks_like_token(text: str) -> bool:
    """Whether it is meant as a token, and not as the name of a file."""
    return re.match(rf"{PREFIX}\d+\.", text) is not None


def read_token(text: str) -> Token:
    """The token. Line breaks that a terminal or a mail added do not matter. Raises WrongToken."""
    joined = "".join(text.split())
    if not looks_like_token(joined):
        raise WrongToken(f"it does not begin with {PREFIX}{VERSION}. as tokens of `baton token` do")
    version = int(joined.removeprefix(PREFIX).partition(".")[0])
    if version != VERSION:
        raise WrongToken(f"it has version {version}, and this Baton reads {VERSION}: use one version on all hosts")
    found = FORM.fullmatch(joined)
    if not found or found[3] != _check_of(found[2]):
        raise WrongToken(f"it was cut off or changed ({len(joined)} characters): copy the whole text")
    try:
        token = msgspec.json.decode(_unpacked(found[2]), type=Token)
    except (binascii.Error, zlib.error, msgspec.DecodeError) as error:
        raise WrongToken(f"its content cannot be read: {error}") from error
    _check(token)
    return token


def _check(token: Token) -> None:
    """What a token must not do, whoever wrote it. Raises WrongToken."""
    ids = [*worker_names(token.part.models, token.part.name)]
    if not all(is_subject_token(name) for name in (token.part.name, *token.seeds)):
        raise WrongToken("a name in it has other characters than letters, digits, '-' and '_'")
    if not ids or not token.nats_urls or not all(url.startswith("tls://") for url in token.nats_urls):
        raise WrongToken("it names no worker, or no NATS with TLS")
    if missing := [name for name in ids if name not in token.seeds]:
        raise WrongToken(f"it has no key for {missing[0]}")
    for name in token.part.env:
        if why := unusable_variable(name):
            raise WrongToken(f"{name}: {why}")


def _unpacked(payload: str) -> bytes:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)), BYTES_MAX)
    if unpacker.unconsumed_tail:
        raise WrongToken(f"it is larger than {BYTES_MAX} bytes")
    return data


def _check_of(payload: str) -> str:
    return hashlib.sha256(payload.encode()).hexdigest()[:CHECK_CHARS]
