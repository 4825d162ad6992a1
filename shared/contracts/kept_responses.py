"""Responses that routers keep for their clients: entries of a bucket, and questions to the router that makes one.

An entry is larger than a value of a bucket may be, so it is stored in parts. The first part has the entry's key,
further ones have the key with a number. All parts of one version name it; a reader takes parts of one version only.
"""

from __future__ import annotations

import hashlib

from shared.contracts.ids import RouterId
from shared.contracts.message import Message, PackedMessage

PART_BYTES = 30 * 1024
"""Of an entry in one part; a value of a bucket has at most 32 KiB."""
PARTS_MAX = 1024
KEY_CHARS = 48
RESPONSES_S = 86_400.0
RESPONSES_BYTES_MAX = 256 * 1024 * 1024
"""Of the whole bucket. When it is full, its oldest parts make room."""


class ResponsePart(PackedMessage, frozen=True, kw_only=True):
    """A part of an entry, compressed."""

    key: str
    """Of this part: see ``part_key``."""
    version: str
    parts: int
    """Of the entry."""
    data: bytes


class AskResponse(Message, frozen=True, kw_only=True):
    """Router -> router: is this response still being made? ``cancel``: end it."""

    router_id: RouterId
    key: str
    cancel: bool = False


class ResponseRuns(Message, frozen=True, kw_only=True):
    """Router -> router. False: the entry says how it ended."""

    router_id: RouterId
    runs: bool


def entry_key(tenant: str, response_id: str) -> str:
    """The key of a tenant's response. Other tenants' requests lead to other keys, whatever id they name."""
    return hashlib.sha256(f"{tenant}\0{response_id}".encode(errors="surrogatepass")).hexdigest()[:KEY_CHARS]


def part_key(key: str, number: int) -> str:
    """The key of a part; the first has number 0."""
    return f"{key}-{number}" if number else key
