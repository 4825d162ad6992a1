"""Clients' files and batches, as routers keep them in key-value buckets.

The bytes of a file are one or several *segments*: byte streams to which one writer appends. A segment lies in parts of
``PART_BYTES``, all full but the last, and a record says how many of its bytes count. A writer that is interrupted, or
replaced by another, may leave further bytes after them; no reader sees those.

The record of a batch is also the claim of the router that runs it: each write needs the revision before it, and says
in ``run`` whose it is. A router whose batch was taken over by another one cannot write any more.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from shared.contracts.message import Message, PackedMessage

PART_BYTES = 30 * 1024
"""A value of a bucket has at most 32 KiB."""
FILES_S = 31 * 86_400.0
"""A part is lost so long after it was written: a day later than the file of a batch that took a day."""
FILE_S_MAX = 30 * 86_400
FILES_BYTES_MAX = 1024 * 1024 * 1024
"""Maximum bytes of all files of all tenants."""
RECORDS_BYTES_MAX = 64 * 1024 * 1024
TENANT_CHARS = 24
UPLOAD = "upload"
"""The purpose of a record that is no file yet: its segment arrives, and its size is not known."""

FILE_ID, BATCH_ID = re.compile(r"file-[0-9a-f]{32}"), re.compile(r"batch_[0-9a-f]{32}")

VALIDATING, FAILED, IN_PROGRESS, FINALIZING = "validating", "failed", "in_progress", "finalizing"
COMPLETED, EXPIRED, CANCELLING, CANCELLED = "completed", "expired", "cancelling", "cancelled"
ENDED = frozenset({FAILED, COMPLETED, EXPIRED, CANCELLED})


class Segment(PackedMessage, frozen=True, kw_only=True):
    """So many bytes of one writer."""

    token: str
    """Token of the file's parts: see ``part_key``."""
    size: int


class FilePart(PackedMessage, frozen=True, kw_only=True):
    """A part of a segment."""

    key: str
    data: bytes


class StoredFile(Message, frozen=True, kw_only=True):
    """A file; times in seconds since 1970."""

    key: str
    """See ``record_key``."""
    id: str
    filename: str
    purpose: str
    created_at: int
    expires_at: int
    segments: list[Segment]

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(one.size for one in self.segments)


class LineFault(Message, frozen=True, kw_only=True):
    """What is wrong with the input of a batch."""

    code: str
    message: str
    line: int | None = None
    """Line from 1; None: the whole file."""
    param: str | None = None


class BatchUsage(Message, frozen=True, kw_only=True):
    """Tokens of the lines that were answered, as their answers tell."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: BatchUsage) -> BatchUsage:
        return BatchUsage(
            input_tokens=self.input_tokens + other.input_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
        )


class BatchProgress(Message, frozen=True, kw_only=True):
    """What of a batch is done for good. Lines count from 0."""

    line: int = 0
    """All before it are done."""
    offset: int = 0
    """Where it begins in the input."""
    ahead: list[int] = msgspec.field(default_factory=list)
    """Lines after it that are done too."""
    completed: int = 0
    failed: int = 0
    output: list[Segment] = msgspec.field(default_factory=list)
    errors: list[Segment] = msgspec.field(default_factory=list)
    usage: BatchUsage = BatchUsage()


class StoredBatch(Message, frozen=True, kw_only=True):
    """A batch; times in seconds since 1970."""

    key: str
    """See ``record_key``."""
    id: str
    tenant: str
    api_key: str
    """SHA-256 of the API key whose requests its lines are; empty without keys."""
    endpoint: str
    input_file_id: str
    input: list[Segment]
    completion_window: str
    metadata: dict[str, str] | None
    status: str
    created_at: int
    expires_at: int
    times: dict[str, int] = msgspec.field(default_factory=dict)
    """When it came to each other status."""
    total: int = 0
    """Lines, when they have been validated."""
    model: str = ""
    """Model of all lines, when they have been validated; empty: they name several."""
    faults: list[LineFault] = msgspec.field(default_factory=list)
    output_file_id: str = ""
    error_file_id: str = ""
    progress: BatchProgress = BatchProgress()
    router_id: str = ""
    """The router that runs it; empty: any may."""
    run: str = ""
    """Claim of the router that runs the batch."""
    runs: int = 0
    """Claims so far."""

    @property
    def has_ended(self) -> bool:
        """No router will change it any more."""
        return self.status in ENDED


def record_key(tenant: str, record_id: str) -> str:
    """The key of a tenant's file or batch. Other tenants' requests lead to other keys, whatever id they name."""
    return tenant_prefix(tenant) + record_id


def tenant_prefix(tenant: str) -> str:
    """With which the keys of a tenant's records begin."""
    return hashlib.sha256(tenant.encode(errors="surrogatepass")).hexdigest()[:TENANT_CHARS] + "-"


def upload_key(token: str) -> str:
    """The key of the record of a file that arrives in the segment with this token. It is no tenant's."""
    return f"{UPLOAD}-{token}"


def part_key(token: str, number: int) -> str:
    """The key of a segment's part; the first has number 0."""
    return f"{token}-{number}"
