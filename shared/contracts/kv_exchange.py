"""The KV exchange: handshake, leases on KV blocks, reads and reports.

reader                                             holder
  LeaseKv(hashes, hold_s, follow_s)   ──────►        pins the longest prefix that it holds
                          ◄──────   KvGrant          block ids by KV cache group, expiry on the holder's clock
  NIXL READ of those blocks           ◄══════        the holder's engine is not involved
  ReleaseKv                           ──────►        unpins the blocks; without it the lease expires

A block is identified by the engine's full chained hash (32 bytes); equal hashes mean equal prefixes and equal KV.
Clocks are monotonic seconds of the machine named. A reader bounds how far the holder's clock may be ahead of its own.
"""

from __future__ import annotations

import math
import secrets
from array import array
from collections.abc import Iterable
from enum import StrEnum
from hashlib import sha256

import msgspec

from shared.contracts.ids import NO_LEG, Epoch, LegId, WorkerId
from shared.contracts.message import Message, PackedMessage

FULL_HASH_BYTES = 32
BLOCK_ID_BYTES = 4
BASIS_BYTES = 16
KV_DEVICES = ("cpu", "cuda")
"""Kinds of memory in which KV blocks lie."""
LEASE_BLOCKS_MAX = 16384
"""Maximum number of blocks in one LeaseKv; the rest of a longer prompt is computed."""


DIGEST_BYTES = 16
DIGEST_VERSION = 1
"""What ``KvDigest.digest`` is made of. Digests of different versions are not compared."""
KV_GROUPS_MAX = 64
"""Maximum number of KV cache groups of a model."""
GROUP = 0
"""The KV cache group of a model that has one."""
CHAIN_BLOCKS_MAX = 1 << 24
"""Maximum number of blocks of a prompt."""
PROMPT_TOKENS_MAX = 1 << 40
"""What no prompt's number of tokens reaches, and what can be computed with in 64 bits."""


def new_lease_id() -> str:
    """128 random bits, as a subject token: no reader can take the id of another's next lease, or release its offer."""
    return secrets.token_hex(16)


def pack_full_hashes(hashes: Iterable[bytes]) -> bytes:
    """Concatenated full block hashes."""
    return b"".join(hashes)


def unpack_full_hashes(packed: bytes) -> list[bytes]:
    """The hashes in ``packed``. Raises ValueError when its length is no multiple of 32."""
    if len(packed) % FULL_HASH_BYTES:
        raise ValueError(f"{len(packed)} bytes are not a whole number of {FULL_HASH_BYTES}-byte hashes")
    return [packed[at : at + FULL_HASH_BYTES] for at in range(0, len(packed), FULL_HASH_BYTES)]


def pack_block_ids(ids: Iterable[int]) -> bytes:
    """Block numbers as 32-bit integers, little-endian on every machine that vLLM runs on."""
    return array("I", ids).tobytes()


def unpack_block_ids(packed: bytes) -> list[int]:
    """The block numbers in ``packed``. Raises ValueError when its length is no multiple of 4."""
    return array("I", packed).tolist()


class NoGrant(StrEnum):
    """Why a holder grants no blocks, or no further ones."""

    NOT_HELD = "not_held"
    """The next block is not in the holder's cache."""
    EPOCH = "epoch"
    """The worker has restarted since: its epoch is not the requested one."""
    FULL = "full"
    """Leases already pin the maximum number of blocks."""
    DRAINING = "draining"
    FOLLOW_OVER = "follow_over"
    """The holder did not compute the next block within ``follow_s``, or the leg that was to compute it has ended."""
    UNREACHABLE = "unreachable"
    """Set by the reader: the holder did not reply."""


class FirstToken(Message, frozen=True, kw_only=True):
    """The answer's first token, which a prefill leg sampled at the end of its prompt."""

    token_id: int
    basis: bytes
    """Digest of what the token was sampled from: the prompt and the sampling parameters. The decode engine uses the
    token only if its own request has the same digest.
    """


def first_token_basis(last_full_hash: bytes, tail: Iterable[int], sampling: bytes = b"") -> bytes:
    """``FirstToken.basis``. The hash of the prompt's last full block names all that precedes the ``tail``, with tenant,
    adapter and media; ``sampling`` has the parameters.
    """
    return sha256(b"".join((last_full_hash, array("I", tail).tobytes(), sampling))).digest()[:BASIS_BYTES]


class KvGroupKind(StrEnum):
    """What a KV cache group keeps of a prompt."""

    FULL = "full"
    """Full attention: the KV of all tokens."""
    WINDOW = "window"
    """Sliding window: the KV of the last ``KvGroup.window`` tokens."""
    STATE = "state"
    """Recurrent state: one block, with the state after all tokens."""


class KvGroup(Message, frozen=True, kw_only=True):
    """Layers that share block ids."""

    kind: KvGroupKind
    block_size: int
    """Tokens of a block."""
    window: int = 0
    """Tokens to which a layer attends; 0 for the other kinds."""


class GroupBlocks(PackedMessage, frozen=True, kw_only=True):
    """Consecutive blocks of a prompt in one KV cache group."""

    first: int
    """Index in the prompt of the first one, in blocks of the group."""
    block_ids: bytes


def blocks_in(groups: Iterable[GroupBlocks]) -> int:
    """Number of blocks in all groups."""
    return sum(len(group.block_ids) // BLOCK_ID_BYTES for group in groups)


def _are_sound(groups: list[GroupBlocks], boundary: int, last_hash: bytes) -> bool:
    """Whether the block ids can be read, their numbers are in bounds, and blocks have a hash."""
    return (
        len(groups) <= KV_GROUPS_MAX
        and all(
            0 <= group.first <= CHAIN_BLOCKS_MAX + LEASE_BLOCKS_MAX
            and len(group.block_ids) % BLOCK_ID_BYTES == 0
            and len(group.block_ids) <= LEASE_BLOCKS_MAX * BLOCK_ID_BYTES
            for group in groups
        )
        and 0 <= boundary <= PROMPT_TOKENS_MAX
        and (len(last_hash) == FULL_HASH_BYTES if groups else not boundary)
    )


class LeaseKv(Message, frozen=True, kw_only=True):
    """Reader -> holder: pin these blocks. The holder replies with one KvGrant, or several when following."""

    worker_id: WorkerId
    epoch: Epoch
    reader_id: WorkerId
    ask_id: str
    """Id made by ``new_lease_id``, which is that of the lease too."""
    hashes: bytes
    """Full hashes of one chain, one for each ``KvHandshake.hash_block_size`` tokens."""
    first: int = 0
    """Index in the chain of the first of these hashes. It begins a block of every group. The holder knows nothing of
    the tokens before it, so a boundary needs a widest window of hashes before it, or all.
    """
    have: int = 0
    """Tokens whose full attention the reader has: the holder grants no full-attention block that ends before."""
    hold_s: float
    """Requested lifetime of each grant; the holder may shorten it."""
    follow_s: float = 0.0
    """How long after each grant to wait for the next block that the holder computes; 0: grant only present blocks."""
    leg_id: LegId = NO_LEG
    """Prefill leg that computes the blocks, with ``follow_s``. Its end ends the wait. Empty: unknown."""
    reply_to: str = ""
    """Path of a socket at which the reader's engine receives the grants of an engine on the same machine."""
    listens: bool = False
    """The reader's engine looks for grants among NIXL's notifications, too."""
    end: int = 0
    """Tokens beyond which nothing is granted. Hashes beyond them name what an engine with a drafter must hold, too, to
    find the blocks before. 0: all that the hashes name.
    """
    load_s: float = 0.0
    """How long a store may load blocks from files before it grants what it has. Meanwhile it says again and again, with
    grants of nothing that are not final, that they are coming. 0: the reader does not know of such grants.
    """


class KvGrant(Message, frozen=True, kw_only=True):
    """Holder -> reader: these blocks are pinned until ``until_s`` on the holder's clock."""

    reader_id: WorkerId
    worker_id: WorkerId
    epoch: Epoch
    ask_id: str
    lease_id: str = ""
    """Empty: no block was pinned. Equal for all grants of one LeaseKv."""
    groups: list[GroupBlocks] = msgspec.field(default_factory=list)
    """The blocks granted here, one entry for each group of the handshake. Empty: none."""
    boundary: int = 0
    """Tokens after which the reader can continue: with this grant and the earlier ones of the lease, every group has
    what it needs. 0: these are full-attention blocks of a followed prompt, and the other groups' come with its last
    grant.
    """
    last_hash: bytes = b""
    """Full hash at the boundary or, without one, at the end of the last full-attention block granted here."""
    until_s: float = 0.0
    clock_s: float = 0.0
    """The holder's clock when it granted."""
    final: bool = True
    """No more grants follow."""
    number: int = -1
    """If the grant is sent as a notification of NIXL, too: the number of those of this lease that were before it. The
    reader takes the first copy that comes after the one before. -1: it is sent once.
    """
    reason: NoGrant | None = None
    """Set when fewer blocks than requested were granted in total."""
    prefill_cached_tokens: int = 0
    """Prompt tokens that the holder found in its own cache before it computed the followed prompt. -1: it had not begun
    to, so all that it granted was cached.
    """
    first_token: FirstToken | None = None
    """With the last grant of a followed prompt, if the leg that computes it has ended."""


def is_sound_grant(grant: KvGrant) -> bool:
    """Whether its fields can be read and agree."""
    return (
        _are_sound(grant.groups, grant.boundary, grant.last_hash)
        and (not grant.groups or bool(grant.lease_id))
        and math.isfinite(grant.until_s)
        and math.isfinite(grant.clock_s)
        and (grant.first_token is None or len(grant.first_token.basis) == BASIS_BYTES)
    )


class ReleaseKv(Message, frozen=True, kw_only=True):
    """Reader -> holder: unpin these leases and stop following. The holder ignores unknown leases."""

    worker_id: WorkerId
    epoch: Epoch
    reader_id: WorkerId
    ask_ids: list[str] = msgspec.field(default_factory=list)
    lease_ids: list[str] = msgspec.field(default_factory=list)
    """Leases of offers, which have no ask id."""


class KvOffer(Message, frozen=True, kw_only=True):
    """The KV of a finished prefill leg's prompt, leased to the reader that names ``lease_id``."""

    worker_id: WorkerId
    epoch: Epoch
    lease_id: str
    groups: list[GroupBlocks]
    """The blocks of the prompt, one entry for each group of the handshake."""
    boundary: int = 0
    """Tokens after which the reader can continue: every group has what it needs."""
    last_hash: bytes
    """Full hash at the boundary."""
    until_s: float
    first_token: FirstToken | None = None


def is_sound_offer(offer: KvOffer) -> bool:
    """Whether its fields can be read and agree."""
    return _are_sound(offer.groups, offer.boundary, offer.last_hash) and bool(offer.groups and offer.boundary)


class KvSource(Message, frozen=True, kw_only=True):
    """Router -> worker: a worker that probably holds part of this prompt."""

    worker_id: WorkerId
    epoch: Epoch
    first: int = 0
    """Index in the prompt of the first full-attention block to request from it (in a model without full attention: of
    the first hash).
    """
    end: int = 0
    """Index after the last block; 0: to the end of the prompt."""
    boundary: int = 0
    """In a model with boundaries, the one to request from it, in tokens. One source gives all that is read up to there;
    the next one is asked if it does not. 0: the longest that the source grants.
    """
    follow: bool = False
    """The source is computing the prompt: read its blocks as they are computed."""
    leg_id: LegId = NO_LEG
    """Prefill leg that computes the prompt, with ``follow``."""
    worth_s: float = 0.0
    """What computing all that is fetched is predicted to take, where the source is a store; 0: not known. It is not
    worth waiting longer for blocks that the store has to load.
    """


class LegOrder(Message, frozen=True, kw_only=True):
    """Worker -> its engine, per request: which KV to read and offer. Passed beside the body, never inside it."""

    leg_id: LegId = NO_LEG
    """PREFILL: the leg, whose end ends the wait of readers that follow it."""
    offer: bool = False
    """PREFILL: lease the prompt's blocks at the end and put the offer into the transfer report."""
    offer_id: str = ""
    """Lease id of the offer, chosen in advance and never reused, so that it can be released after any failure. Any
    reader that knows it may release the offer.
    """
    take: KvOffer | None = None
    """DECODE: blocks to read."""
    sources: list[KvSource] = msgspec.field(default_factory=list)
    cache_hit_threshold: float = 0.0
    """Refuse the leg when a smaller fraction of its tokens is cached or fetchable; 0: never."""
    fetch_min_tokens: int = 0
    """Minimum number of tokens to fetch; fewer are computed."""
    wait_s_max: float = 30.0
    """Maximum wait for the next blocks of a followed source."""
    recomputes: bool = False
    """What the leg computes of its prompt, besides the last partial block, another worker has computed before: the
    engine bounds how much of that a step computes beside ready requests.
    """
    itl_target_s: float = 0.0
    """Target for the time between the leg's tokens, within which steps with recomputes shall end; 0: none."""


class KvRead(Message, frozen=True, kw_only=True):
    """The result of one KV source of a request. ``*_at`` fields are on the reader's clock; 0.0: did not happen."""

    worker_id: WorkerId
    epoch: Epoch
    tokens: int = 0
    """Tokens whose KV arrived in time and is used."""
    bytes: int = 0
    requested_at: float = 0.0
    granted_at: float = 0.0
    """First grant with blocks; for an offer, when the scheduler first saw the request."""
    read_at: float = 0.0
    ended_at: float = 0.0
    read_s: float = 0.0
    """Time during which at least one read was in progress."""
    failure: str = ""
    """Why fewer blocks than planned were read, as text."""
    followed: bool = False


class KvTransferReport(Message, frozen=True, kw_only=True):
    """Engine -> worker -> router: where each prompt token's KV came from, and how many drafts were accepted.
    ``prompt_tokens`` is the sum of local, fetched and recomputed tokens.
    """

    prompt_tokens: int = 0
    local_tokens: int = 0
    fetched_tokens: int = 0
    recomputed_tokens: int = 0
    """Computed on this worker. A decode leg normally computes only the last partial block."""
    refetched_tokens: int = 0
    """Fetched again after a preemption."""
    reprefilled_tokens: int = 0
    """Computed again after a preemption."""
    preemptions: int = 0
    refused: bool = False
    """The cache hit threshold was not met."""
    hit_share: float = 0.0
    """The share of the tokens that was cached or could be fetched, if the request is ``refused``."""
    prefill_cached_tokens: int = -1
    """DECODE of a followed prompt: tokens that the prefill worker had cached; -1 when unknown."""
    first_token_received: bool = False
    """DECODE: the answer's first token is the prefill leg's; the engine computed from it on."""
    recompute_slowed_s: float = 0.0
    """Time in which the engine computed less of what did not arrive than it could have, to spare ready requests."""
    drafted_tokens: int = 0
    """Tokens of the answer that the engine's drafter proposed (speculative decoding)."""
    accepted_tokens: int = 0
    """Drafted tokens that the model agreed with."""
    reads: list[KvRead] = msgspec.field(default_factory=list)
    offer: KvOffer | None = None


class KvDigest(Message, frozen=True, kw_only=True):
    """Digest of the bytes of consecutive blocks in one KV cache group, over all heads and layers of the model. Engines
    of one fingerprint have equal digests of equal KV, whatever their tensor parallelism and the places of their blocks.
    """

    version: int = DIGEST_VERSION
    group: int = 0
    """Number of the group in the model's KV cache configuration; models whose KV is exchanged have one."""
    blocks: int = 0
    digest: bytes = b""
    is_uniform: bool = True
    """Whether the ranks that hold the same heads hold equal bytes. A reader reads one of these ranks, so that its own
    digest need not be equal if they differ.
    """


class FetchKv(Message, frozen=True, kw_only=True):
    """Worker -> worker: fetch these blocks (prefetch, replicate, evacuate). No token is computed."""

    worker_id: WorkerId
    sender_id: WorkerId
    hashes: bytes
    """Full hashes of consecutive blocks from the start of a chain."""
    sources: list[KvSource]
    deadline_s: float


class FetchedKv(Message, frozen=True, kw_only=True):
    """Result of FetchKv. The worker now has a prefix of ``held + fetched`` blocks."""

    held: int = 0
    fetched: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failure: str = ""
    """Why fewer blocks than requested were fetched, as text."""


class KvExchangeState(Message, frozen=True, kw_only=True):
    """An engine's current leases and reads, and totals since it started."""

    leases: int = 0
    pinned_blocks: int = 0
    blocks: int = 0
    """Blocks of the engine's pool."""
    next_expiry_s: float = 0.0
    """When the next lease expires, on the engine's clock; 0.0: no lease."""
    reads: int = 0
    """Reads in progress."""
    leases_granted_total: int = 0
    leases_released_total: int = 0
    leases_expired_total: int = 0
    leases_refused_total: int = 0
    reads_total: int = 0
    reads_failed_total: int = 0
    read_bytes_total: int = 0
    read_seconds_total: float = 0.0
    refused_requests_total: int = 0
    """Refused because the cache hit threshold was not met."""
    recomputed_tokens_total: int = 0
    """Prompt tokens that decode legs computed again beyond the last partial block."""
    first_tokens_received_total: int = 0
    """Answers that began with the token of their prefill leg."""
    recompute_slowed_seconds_total: float = 0.0
    """Sum of ``KvTransferReport.recompute_slowed_s``."""
    copied_blocks_total: int = 0
    """Blocks that stores have copied from this engine while it served."""
    lost_blocks_total: int = 0
    """Blocks of recently used prefixes that the engine evicted before a store had copied them. Not counted without a
    store."""
    prefetched_blocks_total: int = 0
    """Blocks that prefetches have brought, which routers order."""
    prefetch_used_blocks_total: int = 0
    """Prefetched blocks that a later request found."""
    prefetch_wasted_blocks_total: int = 0
    """Prefetched blocks that no request found before they were evicted, or in good time."""
    prefetch_seconds_total: float = 0.0
    """The part of ``read_seconds_total`` that reads without a request took."""

    @property
    def prefetched_unused_blocks(self) -> int:
        """Prefetched blocks of which nothing has come yet."""
        return self.prefetched_blocks_total - self.prefetch_used_blocks_total - self.prefetch_wasted_blocks_total


class KvPlane(Message, frozen=True, kw_only=True):
    """Part of one block of one layer: consecutive heads of ``head_bytes`` each."""

    offset: int
    head_bytes: int
    heads: int
    """Heads that the rank holds."""
    total: int
    """Heads of the whole model; 1 for a latent cache (MLA), of which every rank holds a full copy."""


class KvLayer(Message, frozen=True, kw_only=True):
    """One layer's blocks in one rank's memory."""

    name: str
    """The engine's name of the layer. Layers of two engines are paired by it."""
    group: int
    """The layer's KV cache group."""
    base: int
    """Address of block 0."""
    block_stride: int
    """Bytes from one block to the next."""
    planes: list[KvPlane]


class KvRank(Message, frozen=True, kw_only=True):
    """One process of an engine: a tensor-parallel rank of a pipeline stage."""

    rank: int
    """Number of the rank among the tensor-parallel ranks of its stage."""
    agent: bytes
    """NIXL agent metadata."""
    device: str
    """One of ``KV_DEVICES``."""
    device_id: int
    layers: list[KvLayer]
    """The layers of its stage."""
    stage: int = 0


class KvHandshake(Message, frozen=True, kw_only=True):
    """The memory layout of a holder's blocks. A reader asks for it once per pair of workers and epoch, and
    again at intervals for the holder's clock.
    """

    worker_id: WorkerId
    epoch: Epoch
    version: int
    """Version of the connector's protocol."""
    fingerprint: str
    """``Fingerprint.key``: a reader refuses KV of another model, revision or layout."""
    clock_s: float
    """The holder's clock when it replied."""
    hash_block_size: int
    """Tokens of each block hash: the first hash of a prompt names so many tokens, the next one twice as many."""
    alignment: int
    """Boundaries are multiples of so many tokens."""
    groups: list[KvGroup]
    blocks: int
    """Blocks of all groups: they share one pool."""
    ranks: list[KvRank]
    """The ranks of the first stage in their order, then those of the next. Stages have equally many."""
    beyond: int = 0
    """With a drafter, so many tokens beyond a boundary must be held, too, for the engine to find it. See
    ``LeaseKv.end``.
    """


class AskKvHandshake(Message, frozen=True, kw_only=True):
    """Worker -> worker: requests a KvHandshake."""

    worker_id: WorkerId
    reader_id: WorkerId
