"""What routers tell each other, and keep for each other.

Reservations: routers exchange recent placements, so that they do not all choose the same worker.

Kept responses: entries of a bucket, and questions to the router that makes one. An entry is larger than a value of a
bucket may be, so it is stored in parts. The first part has the entry's key, further ones have the key with a number.
All parts of one version name it; a reader takes parts of one version only.
"""

from __future__ import annotations

import hashlib

import msgspec

from shared.contracts.ids import Epoch, RouterId, WorkerId
from shared.contracts.message import Message, PackedMessage

ANNOUNCE_S = 2.0
"""Longest interval between messages of a router. A single router publishes no reservations."""


class Reservation(Message, frozen=True, kw_only=True):
    """Work that a router has just sent to a worker; it counts until the worker's next load report, which has it."""

    worker_id: WorkerId
    epoch: Epoch
    legs: int = 1
    tokens: int = 0
    """Prompt tokens to compute."""
    context_tokens: int = 0
    """Prompt and expected completion, that will lie in its KV cache."""


class WorkerLife(Message, frozen=True, kw_only=True):
    """One life of a worker."""

    worker_id: WorkerId
    epoch: Epoch


class Quarantined(Message, frozen=True, kw_only=True):
    """A request that an engine may have died of: no router should place it."""

    digest: bytes
    """Digest of the body, 16 bytes."""
    for_s: float
    """Seconds from now."""
    silent: list[WorkerLife] = msgspec.field(default_factory=list)
    """Workers that fell silent with it, which is why it is refused: a report of one of them ends that."""


class Reservations(Message, frozen=True, kw_only=True):
    """Router -> routers: what it has placed since its last such message; with nothing in it, a sign of life. ``seq``
    counts from 1.
    """

    router_id: RouterId
    seq: int
    made: list[Reservation]
    quarantined: list[Quarantined] = msgspec.field(default_factory=list)


PART_BYTES = 30 * 1024
"""Bytes of an entry in one part; a value of a bucket has at most 32 KiB."""
PARTS_MAX = 1024
KEY_CHARS = 48
RESPONSES_S = 86_400.0
RESPONSES_BYTES_MAX = 256 * 1024 * 1024
"""Size of the whole bucket. When it is full, its oldest parts make room."""


class ResponsePart(PackedMessage, frozen=True, kw_only=True):
    """A part of an entry, compressed."""

    key: str
    """Key of this part: see ``part_key``."""
    version: str
    parts: int
    """Number of parts that the entry has."""
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
