"""JetStream as key-value stores use it: its JSON API for one bucket's stream, and the stream's configuration."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

import msgspec

from shared.bus.port import AskTimedOut, BusDown, MessageTooLarge, NoResponders, WrongRevision
from shared.contracts.channels import api_subject, stored_subject, stream_of, written_subject

log = logging.getLogger("baton.bus")

T = TypeVar("T", bound="_Answer")

REPLY_S_MAX = 5.0
"""JetStream counts as down if it does not reply within this."""
READS_AT_ONCE = 8
"""Concurrent reads. A restart of the server makes the whole fleet read; when 10,000 requests wait, the server drops
them all."""
VALUE_BYTES_MAX = 32 * 1024
MESSAGE_BYTES_MAX = 2 * VALUE_BYTES_MAX
"""Value and headers, as the server counts them."""
MEMORY_BYTES_MAX, FILE_BYTES_MAX = 64 * 1024 * 1024, 1024 * 1024
"""Size of a bucket: of all worker records, or of a setting or two, for which a small disk must have room."""
DUPLICATE_WINDOW_S_MAX = 1.0
"""Baton does not use it; the server has no zero."""
NS = 1_000_000_000

REPLICAS_MAX = 3
"""Servers of a cluster that keep a stream: one of three may be lost, and more would only cost."""
TOO_FEW_SERVERS = (10005, 10023, 10074)
"""No peers for so many replicas; not enough resources; a single server."""
NO_STREAM = 10059
NAME_IN_USE = 10058
NO_MESSAGE = 10037
WRONG_SEQUENCE = (10071, 10164)
FULL = "maximum bytes exceeded"
"""A description: the code of this error stands for others, too."""

DELETED = {"KV-Operation": "DEL"}
EXPECTED_REVISION = "Nats-Expected-Last-Subject-Sequence"


class Requester(Protocol):
    async def request(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None, timeout_s: float
    ) -> bytes: ...


class NoReply(BusDown):
    """JetStream did not answer in time."""


class NoBucket(BusDown):
    """The bucket does not exist."""


class StreamMessage(msgspec.Struct, frozen=True):
    subject: str
    seq: int
    time: datetime
    data: bytes = b""

    @property
    def key(self) -> str:
        return self.subject.rpartition(".")[2]


class _Error(msgspec.Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Answer(msgspec.Struct, frozen=True):
    error: _Error | None = None


class _Ack(_Answer, frozen=True):
    seq: int = 0


class _Found(_Answer, frozen=True):
    message: StreamMessage | None = None


class _State(msgspec.Struct, frozen=True):
    subjects: dict[str, int] = msgspec.field(default_factory=dict)
    last_seq: int = 0


class _Info(_Answer, frozen=True):
    config: dict[str, Any] = msgspec.field(default_factory=dict)
    state: _State = msgspec.field(default_factory=_State)
    total: int = 0
    """Subjects of the stream; one answer has a part of them."""
    ts: datetime = datetime.fromtimestamp(0, UTC)
    """The server's time."""


@dataclass(frozen=True, slots=True)
class Present:
    """What a bucket held at one moment."""

    messages: list[StreamMessage]
    """The newest of each key, deletions included."""
    ttl_s: float
    """Lifetime of a value; 0: no limit."""
    last_revision: int
    at: datetime
    """Instant by the server's clock."""

    def age_s(self, message: StreamMessage) -> float:
        return (self.at - message.time).total_seconds()


class BucketStream:
    """The stream of one bucket. All methods raise BusDown, and NoBucket if there is none."""

    def __init__(self, connection: Requester, bucket: str) -> None:
        self.bucket = bucket
        self._connection = connection

    async def write(self, key: str, payload: bytes, revision: int | None = None) -> int:
        """Store a value, or a deletion if the payload is empty, and return its revision. With ``revision``, only over
        that one (0: only if there is none); raises WrongRevision.
        """
        if len(payload) > VALUE_BYTES_MAX:
            raise MessageTooLarge(f"{len(payload)} bytes; a value of {self.bucket} has at most {VALUE_BYTES_MAX}")
        headers = {} if payload else dict(DELETED)
        if revision is not None:
            headers[EXPECTED_REVISION] = str(revision)
        try:
            ack = await self._ask(written_subject(self.bucket, key), payload, headers, _Ack)
        except NoReply as error:
            raise BusDown(f"{error}; after a full disk nats-server stores nothing until it is restarted") from error
        if ack.error is None:
            return ack.seq
        if ack.error.err_code in WRONG_SEQUENCE:
            raise WrongRevision(f"{self.bucket}.{key}: {ack.error.description}")
        full = "; the bucket is full" if ack.error.description == FULL else ""
        raise BusDown(f"JetStream refuses {self.bucket}.{key}: {ack.error.description}{full}")

    async def newest(self, key: str) -> StreamMessage | None:
        """What is stored under the key: a value, or a deletion, whose data is empty."""
        wanted = {"last_by_subj": written_subject(self.bucket, key)}
        found = await self._api("STREAM.MSG.GET", wanted, _Found)
        if found.error is None or found.error.err_code == NO_MESSAGE:
            return found.message
        raise self._failed(found.error)

    async def present(self, prefixes: tuple[str, ...] = ("",)) -> Present:
        """All that is stored under keys that begin with one of these."""
        subjects: list[str] = []
        while True:
            info = await self._info({"subjects_filter": written_subject(self.bucket, "*"), "offset": len(subjects)})
            subjects += info.state.subjects
            if not info.state.subjects or len(subjects) >= info.total:
                break
        found: list[StreamMessage] = []
        keys_found = [key for subject in subjects if (key := subject.rpartition(".")[2]).startswith(prefixes)]
        for first in range(0, len(keys_found), READS_AT_ONCE):
            keys = keys_found[first : first + READS_AT_ONCE]
            messages = await asyncio.gather(*map(self.newest, keys))
            found += [one for one in messages if one is not None]
        return Present(found, info.config.get("max_age", 0) / NS, info.state.last_seq, info.ts)

    async def must_exist(self) -> None:
        await self._info({})

    async def make(
        self, ttl_s: float | None, file_bytes_max: int = 0, *, drops_oldest: bool = False, replicas_max: int = 1
    ) -> None:
        """Make the stream, or put its configuration right. A stream that cannot be changed into what it should be (an
        earlier version made it, it is sealed) is made anew, and its values are lost; not with ``file_bytes_max``, and
        not because of its replicas: of a cluster, as many servers keep the stream as can, up to ``replicas_max``.
        """
        wanted = stream_config(self.bucket, ttl_s, file_bytes_max, drops_oldest=drops_oldest)
        try:
            present = (await self._info({})).config
        except NoBucket:
            made = await self._replicated("STREAM.CREATE", wanted, replicas_max)
            if made.error is None:
                log.info("made the bucket %s", self.bucket)
                return
            if made.error.err_code != NAME_IN_USE:
                raise self._failed(made.error) from None
            present = (await self._info({})).config  # Another process has just made it, with other settings.
        replicas = present.get("num_replicas", 1)
        wanted["num_replicas"] = replicas
        if settings_of(present) == settings_of(wanted):
            if replicas < replicas_max:  # The cluster has grown, or some servers were away when the stream was made.
                await self._replicated("STREAM.UPDATE", wanted, replicas_max, above=replicas)
            return
        changed = await self._api("STREAM.UPDATE", wanted, _Answer)
        if changed.error is None:
            log.warning("the bucket %s had another configuration: changed", self.bucket)
            return
        if file_bytes_max:
            raise self._failed(changed.error)
        log.warning("the bucket %s is made anew, without its values: %s", self.bucket, changed.error.description)
        deleted = await self._api("STREAM.DELETE", None, _Answer)
        made = deleted if deleted.error is not None else await self._replicated("STREAM.CREATE", wanted, replicas_max)
        if made.error is not None:
            raise self._failed(made.error)

    async def _replicated(self, verb: str, wanted: Mapping[str, Any], replicas_max: int, *, above: int = 0) -> _Answer:
        """Make or change the stream with as many replicas as the cluster can have, more than ``above``."""
        answer = _Answer()
        for replicas in range(replicas_max, above, -1):
            answer = await self._api(verb, {**wanted, "num_replicas": replicas}, _Answer)
            if answer.error is None or answer.error.err_code not in TOO_FEW_SERVERS:
                break
        return answer

    async def _info(self, wanted: Mapping[str, Any]) -> _Info:
        info = await self._api("STREAM.INFO", wanted, _Info)
        if info.error is not None:
            raise self._failed(info.error)
        return info

    async def _api(self, verb: str, body: Mapping[str, Any] | None, answer: type[T]) -> T:
        payload = msgspec.json.encode(body) if body else b""
        return await self._ask(api_subject(verb, self.bucket), payload, None, answer)

    async def _ask(self, subject: str, payload: bytes, headers: Mapping[str, str] | None, answer: type[T]) -> T:
        try:
            reply = await self._connection.request(subject, payload, headers, REPLY_S_MAX)
            return msgspec.json.decode(reply, type=answer)
        except NoResponders:
            raise NoBucket(
                f"{subject}: JetStream is off or starting, or an orchestrator has yet to make this"
            ) from None
        except AskTimedOut as error:
            raise NoReply(f"JetStream: {error}") from error
        except msgspec.MsgspecError as error:
            raise BusDown(f"JetStream: {error}") from error

    def _failed(self, error: _Error) -> BusDown:
        if error.err_code == NO_STREAM:
            why = "an orchestrator makes it when NATS has the space"
            return NoBucket(f"the bucket {self.bucket} does not exist yet: {why}")
        return BusDown(f"JetStream: {self.bucket}: {error.description}")


def stream_config(
    bucket: str, ttl_s: float | None, file_bytes_max: int = 0, *, drops_oldest: bool = False
) -> dict[str, Any]:
    """The one configuration of a bucket. It permits no headers with effects: no roll-up, lifetimes or schedules.
    ``file_bytes_max``: values that expire are kept in files of at most that size nevertheless.
    """
    ttl_ns = int((ttl_s or 0) * NS)
    in_memory = ttl_ns and not file_bytes_max
    duplicate_window_ns = int(DUPLICATE_WINDOW_S_MAX * NS)
    return {
        "name": stream_of(bucket),
        "subjects": [written_subject(bucket, "*")],
        "retention": "limits",
        # Values that are renewed need no disk. On a full one the server would refuse them, until it is restarted.
        "storage": "memory" if in_memory else "file",
        "discard": "old" if drops_oldest else "new",
        "num_replicas": 1,
        "max_msgs_per_subject": 1,
        "max_msg_size": MESSAGE_BYTES_MAX,
        "max_bytes": MEMORY_BYTES_MAX if in_memory else file_bytes_max or FILE_BYTES_MAX,
        "max_age": ttl_ns,
        "duplicate_window": min(ttl_ns, duplicate_window_ns) if ttl_ns else duplicate_window_ns,
        "deny_delete": True,
        "deny_purge": True,
        "republish": {"src": written_subject(bucket, "*"), "dest": stored_subject(bucket, "{{wildcard(1)}}")},
    }


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without what the server adds: its notes, and defaults."""
    defaults: tuple[object, ...] = (None, False, 0, -1, "", "none", [], {})
    return {name: value for name, value in config.items() if name != "metadata" and value not in defaults}
