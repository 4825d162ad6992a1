"""Messages between a worker process, its engine's connector, and the connector's two roles in the engine; and the
settings that the worker gives to the connector.

``EngineCall`` goes from the worker to the engine as a utility call, which an idle engine answers without a step.
``EngineNotification`` is its result, and is also pushed after a step that produced something new. Both are msgpack and
never leave the machine. ``Orders`` go from the connector's scheduler role to its worker role, which may be another
process, and ``Results`` come back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec

from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import (
    DIGEST_BYTES,
    FetchedKv,
    FetchKv,
    KvDigest,
    KvExchangeState,
    KvGrant,
    KvHandshake,
    LeaseKv,
    ReleaseKv,
)
from shared.contracts.message import Message
from shared.contracts.workers import Fingerprint, KvMemory


class Peer(Message, frozen=True, kw_only=True):
    """A worker whose blocks may be read."""

    handshake: KvHandshake
    clock_ahead_s: float
    """The most that its clock may be ahead of this worker's."""


class PeerGone(Message, frozen=True, kw_only=True):
    """The worker with this epoch is gone: forget its memory, fail reads from it."""

    worker_id: WorkerId
    epoch: Epoch


class StartFetch(Message, frozen=True, kw_only=True):
    """Fetch these blocks; the result is a ``FetchEnded`` with the same ``fetch_id``."""

    fetch_id: str
    fetch: FetchKv
    is_prefetch: bool = False
    """Whether a request is to find the blocks. Blocks that no request has found yet have a bound then, and count."""


class MeasureRead(Message, frozen=True, kw_only=True):
    """Measure how fast this engine reads blocks of the worker; the result is a ``ReadMeasured`` with the same id."""

    measure_id: str
    worker_id: WorkerId
    epoch: Epoch


class DigestLease(Message, frozen=True, kw_only=True):
    """Compute digests of the blocks of this engine's lease, and end it; the result is a ``LeaseDigested`` with the same
    id.
    """

    digest_id: str
    lease_id: str


class Chain(Message, frozen=True, kw_only=True):
    """A recently used prefix that an engine holds, offered for copying."""

    hashes: bytes
    """Full hashes of its blocks from the first on (see ``kv_exchange.pack_full_hashes``)."""
    uses: int = 1
    """Recent requests that began with it."""
    is_evicting: bool = False
    """The engine will need its blocks for others soon."""


class EngineCall(Message, frozen=True, kw_only=True):
    """A worker's call to its engine; the engine carries it out in the order of the fields."""

    describe: bool = False
    """Whether to reply with ``EngineNotification.handshake``."""
    peers: list[Peer] = msgspec.field(default_factory=list)
    """New peers, or known ones with a newer clock."""
    gone: list[PeerGone] = msgspec.field(default_factory=list)
    releases: list[ReleaseKv] = msgspec.field(default_factory=list)
    leases: list[LeaseKv] = msgspec.field(default_factory=list)
    grants: list[KvGrant] = msgspec.field(default_factory=list)
    """Grants of other workers to this engine."""
    fetches: list[StartFetch] = msgspec.field(default_factory=list)
    measures: list[MeasureRead] = msgspec.field(default_factory=list)
    digests: list[DigestLease] = msgspec.field(default_factory=list)
    chains_max: int = 0
    """Maximum number of ``EngineNotification.chains`` in the reply."""
    chains_uses_min: int = 1
    """Number of requests that must have used a chain."""
    chains_idle_s_max: float = math.inf
    """Only chains used within this time."""
    chains_for_store: bool = False
    """Whether chains that the engine evicts next count, too, whatever their use. Each is told once after a use, unless
    ``chains_idle_s_max`` is infinite."""
    chains_blocks_min: int = 1
    """Only chains of so many blocks count because they are evicted next."""
    release_all: bool = False
    """Whether to unpin everything and grant nothing more, because the engine ends."""


class PeerConnected(Message, frozen=True, kw_only=True):
    """The engine can read from the worker, or ``failure`` says why not."""

    worker_id: WorkerId
    epoch: Epoch
    seconds: float = 0.0
    failure: str = ""


class FetchEnded(Message, frozen=True, kw_only=True):
    fetch_id: str
    result: FetchedKv


class ReadMeasured(Message, frozen=True, kw_only=True):
    measure_id: str
    bytes: int = 0
    """Size of the fastest read."""
    bytes_per_s: float = 0.0
    """Speed of the fastest read."""
    memory: KvMemory = KvMemory.CPU
    failure: str = ""
    notice_s: float = 0.0
    """Seconds from a request for blocks to its grant, as a notification of NIXL; 0.0: not known."""
    bus_s: float = 0.0
    """Seconds from a request for blocks to its grant over the bus; 0.0: not known."""


class LeaseDigested(Message, frozen=True, kw_only=True):
    digest_id: str
    digests: list[KvDigest] = msgspec.field(default_factory=list)
    """One for each KV cache group."""
    failure: str = ""


class EngineNotification(Message, frozen=True, kw_only=True):
    """News from an engine to its worker. Most lists are empty."""

    handshake: KvHandshake | None = None
    unknown_peers: list[WorkerId] = msgspec.field(default_factory=list)
    """Workers named as sources of which the engine needs the handshake."""
    leases: list[LeaseKv] = msgspec.field(default_factory=list)
    """Requests to send to other workers."""
    grants: list[KvGrant] = msgspec.field(default_factory=list)
    releases: list[ReleaseKv] = msgspec.field(default_factory=list)
    answered: list[str] = msgspec.field(default_factory=list)
    """Ask ids of ``leases`` whose last grant came from the holder's engine, past the bus."""
    connected: list[PeerConnected] = msgspec.field(default_factory=list)
    fetched: list[FetchEnded] = msgspec.field(default_factory=list)
    measured: list[ReadMeasured] = msgspec.field(default_factory=list)
    digested: list[LeaseDigested] = msgspec.field(default_factory=list)
    chains: list[Chain] = msgspec.field(default_factory=list)
    """Most used first, after those that are evicted next; none is a prefix of another."""
    lost_blocks: int = 0
    """Blocks of chains that were evicted before they were told for a store, since the last reply about those."""
    state: KvExchangeState | None = None
    """Leases and reads after this notification."""


PeerKey = tuple[str, int]
"""Worker id and epoch. A restarted worker has a greater epoch."""


@dataclass(slots=True)
class Read:
    """Read these blocks from a peer."""

    read_id: int
    peer: PeerKey
    remote_blocks: list[int]
    local_blocks: list[int]
    """Destinations, one for each remote block."""
    until_s: float
    """On the clock of the reader's scheduler, with margins subtracted: bytes that arrive later do not count."""
    group: int
    """The KV cache group of the blocks."""
    part_blocks: int
    """Blocks of each part but the last. The scheduler role cuts reads, so that all ranks report the same parts."""


@dataclass(slots=True)
class DigestBlocks:
    """Compute digests of this engine's own blocks."""

    digest_number: int
    groups: list[list[int]]
    """Blocks of each KV cache group."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Send this to the engine of a peer as a notification of NIXL."""

    peer: PeerKey
    packed: bytes
    """A KvGrant, msgpack."""


@dataclass(slots=True)
class Orders:
    connect: list[Peer] = field(default_factory=list)
    forget: list[PeerKey] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    cancel: list[int] = field(default_factory=list)
    """Reads that are not needed any more. They are still reported, when no byte of them can move."""
    digests: list[DigestBlocks] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    listens: bool | None = None
    """Whether to look for notices from now on; None: as before."""

    def __bool__(self) -> bool:
        moves = self.connect or self.forget or self.reads or self.cancel or self.digests
        return bool(moves or self.notices or self.listens is not None)


@dataclass(slots=True)
class Connected:
    """The end of a connection attempt of one rank."""

    peer: PeerKey
    seconds: float
    failure: str = ""


@dataclass(slots=True)
class ReadPart:
    """Consecutive blocks of a read that arrived or failed. No byte of them moves after this report."""

    read_id: int
    first: int
    """Index in the read's block lists."""
    count: int
    bytes: int
    started_s: float
    ended_s: float
    failure: str = ""


HeadKey = tuple[int, str, int, int]
"""A KV cache group, a layer, the heads of the whole model in a plane, and one of them: planes may differ in heads."""


@dataclass(slots=True)
class BlocksDigested:
    """Digests of blocks by the layers and heads that one rank holds; after ``RankAggregation``, of all."""

    digest_number: int
    heads: dict[HeadKey, bytes]
    uneven: set[int] = field(default_factory=set)
    """Groups that are not uniform (see ``KvDigest``)."""
    failure: str = ""

    def digest(self, group: int) -> bytes:
        """One digest of all heads of the group."""
        of_heads = (self.heads[key] for key in sorted(self.heads) if key[0] == group)
        return blake2b(b"".join(of_heads), digest_size=DIGEST_BYTES).digest()


@dataclass(slots=True)
class Results:
    """Results of one step, of one rank or, after ``RankAggregation``, of all."""

    connected: list[Connected] = field(default_factory=list)
    parts: list[ReadPart] = field(default_factory=list)
    digested: list[BlocksDigested] = field(default_factory=list)
    clocks: dict[int, float] = field(default_factory=dict)
    """What the clock of a further host of the engine shows, from one of its ranks now and then."""

    def __bool__(self) -> bool:
        return bool(self.connected or self.parts or self.digested or self.clocks)


class RankAggregation:
    """Joins the results of an engine's ranks, of all pipeline stages, each of which reads its share of each block.

    Each of ``ranks`` reports each part, connection and digest once. A read part is final when the last rank has
    reported it; a peer is connected when all ranks are, and lost when one rank has lost it.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._parts: dict[tuple[int, int], list[ReadPart]] = {}
        self._connected: dict[PeerKey, list[Connected]] = {}
        self._digested: dict[int, list[BlocksDigested]] = {}

    def add(self, results: Results) -> Results:
        """Add one rank's results; returns what has become final with them."""
        if self._ranks == 1:
            return results
        final = Results()
        for part in results.parts:
            key = (part.read_id, part.first)
            shares = self._parts.setdefault(key, [])
            shares.append(part)
            if len(shares) == self._ranks:
                final.parts.append(_joined(self._parts.pop(key)))
        for connected in results.connected:
            reports = self._connected.setdefault(connected.peer, [])
            reports.append(connected)
            if connected.failure or len(reports) == self._ranks:
                del self._connected[connected.peer]
                seconds = max(one.seconds for one in reports)
                final.connected.append(Connected(connected.peer, seconds, connected.failure))
        for one in results.digested:
            of_ranks = self._digested.setdefault(one.digest_number, [])
            of_ranks.append(one)
            if len(of_ranks) == self._ranks:
                final.digested.append(_joined_digests(self._digested.pop(one.digest_number)))
        return final


def _joined(parts: list[ReadPart]) -> ReadPart:
    """One part from all ranks' shares: failed if any failed, ended with the last."""
    return ReadPart(
        read_id=parts[0].read_id,
        first=parts[0].first,
        count=parts[0].count,
        bytes=sum(part.bytes for part in parts),
        started_s=min(part.started_s for part in parts),
        ended_s=max(part.ended_s for part in parts),
        failure=next((part.failure for part in parts if part.failure), ""),
    )


def _joined_digests(ranks: list[BlocksDigested]) -> BlocksDigested:
    """The heads of all ranks. Of ranks that hold the same head, the first counts."""
    joined = BlocksDigested(ranks[0].digest_number, {})
    for one in ranks:
        joined.failure = joined.failure or one.failure
        for key, digest in one.heads.items():
            if joined.heads.setdefault(key, digest) != digest:
                joined.uneven.add(key[0])
    return joined


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``kv_connector_extra_config``, read once at start. Durations are in seconds."""

    worker_id: str
    epoch: int
    fingerprint: Fingerprint
    """Fingerprint without a valid block size: vLLM chooses it while the engine starts."""
    notifications: str = ""
    """ZMQ endpoint at which the worker receives ``EngineNotification``; empty: none."""
    lease_s: float = 30.0
    """Duration of a prefill leg's offer."""
    lease_s_max: float = 60.0
    lease_share_max: float = 0.5
    """Share of the block pool that leases may pin."""
    answer_s_max: float = 0.5
    """Maximum wait for another worker to reply to a lease request."""
    grant_socket: str = ""
    """Path at which to receive grants of engines on the same machine; empty: all come over the bus."""
    copy_cores: list[int] = msgspec.field(default_factory=list)
    """CPU cores on which the transfer thread may run besides the model's core."""
    retains_answers: bool = False
    """Whether to keep windows and states within answers, besides those at the end of a prompt."""
    refusal_file: str = ""
    """File for the reason if the engine's KV cache cannot be exchanged; empty: none."""
    agent: str = "connector.transfer.nixl_agent:NixlAgent"
    """Class of the transfer agent, as ``module:name``, which is called with a name and ``backend``: the fingerprint's
    ``kv_backend``.
    """

    def fingerprint_key(self, hash_block_size: int) -> str:
        """``Fingerprint.key`` of an engine with block hashes of so many tokens."""
        return msgspec.structs.replace(self.fingerprint, block_size=hash_block_size).key()


def read_settings(extra: dict[str, Any]) -> ConnectorSettings:
    """Raises ValueError naming the wrong setting."""
    try:
        return msgspec.convert(extra, ConnectorSettings)
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_connector_extra_config of the Baton connector: {error}") from error
