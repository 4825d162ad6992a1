"""Worker registry records and the fleet state."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

import msgspec

from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.message import Message

WORKER_RECORD_TTL_S = 10.0
"""A record expires when it is not renewed within this time. All processes open the channel with this value."""


class Role(StrEnum):
    """The legs that routers place on a worker. Every engine can run both kinds; a store has no engine."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    STORE = "store"
    """Holds copies of KV blocks and serves them to other workers; runs no legs."""


class WorkerPhase(StrEnum):
    """A worker's lifecycle phase. The worker sets it; only LOST is set by the orchestrator."""

    STARTING = "starting"
    PROBING = "probing"
    """The engine runs; the worker tests the KV exchange before it accepts traffic."""
    READY = "ready"
    DRAINING = "draining"
    ASLEEP = "asleep"
    """No engine: the worker starts one when it is woken."""
    GONE = "gone"
    LOST = "lost"


WITHOUT_ENGINE = frozenset({WorkerPhase.STARTING, WorkerPhase.ASLEEP})
"""In these phases a worker reports no load, and answers no asks about its engine, whose facts are not known yet."""


class HashScheme(Message, frozen=True, kw_only=True):
    """How the engine hashes its KV blocks; routers compute the same chain of hashes."""

    algorithm: str = "sha256_cbor"
    seed: str = "vllm-none-hash"
    """The string whose hash is the parent of the first block."""
    block_size: int
    """Tokens of each block hash. A block of the engine's KV cache has as many, or a multiple."""
    index_block: int = 0
    """Tokens of a full-attention block: so far apart are the hashes that name one. 0: ``block_size``; with
    ``boundaries``, the model has no full attention.
    """
    boundaries: bool = False
    """Whether the model has KV cache groups other than full attention (windows, recurrent state). They keep what a
    prompt needs at a few hashes only, its boundaries: no prefix between two of them is of use.
    """
    alignment: int = 0
    """Boundaries are at multiples of as many tokens. 0: ``block_size``."""
    window_block: int = 0
    """Tokens of a sliding window's block, in a model whose other groups are all windows."""
    window_blocks: int = 1
    """So many of the window's blocks up to a boundary must be held, unless the prompt begins among them."""
    full_beyond: int = 0
    """So many tokens beyond a boundary full attention must be held, too: an engine with a drafter drops the end of what
    it finds.
    """
    window_beyond: int = 0
    """As ``full_beyond``, of windows: their block after the boundary."""
    dropped: int = 0
    """So many tokens at the end of what it finds cached an engine with one KV cache group and a drafter (EAGLE, MTP)
    does not use. A handoff brings them.
    """
    narrow: bool = False
    """Whether there are narrower windows than that of ``window_blocks``. Of these the last block must be held; it is
    told under its hash XOR ``NARROW_MARK``.
    """

    @property
    def stride(self) -> int:
        """Hashes of a full-attention block; 0: the model has no full attention."""
        return self.index_block // self.block_size or int(not self.boundaries)

    @property
    def window_stride(self) -> int:
        """Hashes of a window's block; for other models, those between two boundaries."""
        return (self.window_block or self.align) // self.block_size

    @property
    def align(self) -> int:
        """Tokens between the lengths of prefixes that can be of use."""
        return (self.boundaries and self.alignment) or self.block_size

    @property
    def beyond(self) -> int:
        """The larger of ``full_beyond`` and ``window_beyond``."""
        return max(self.full_beyond, self.window_beyond)

    def usable(self, prompt_tokens: int) -> int:
        """Tokens of the longest prefix that an engine can find cached: a prompt's last token is always computed."""
        found = (prompt_tokens - 1) // self.block_size * self.block_size - self.dropped
        return max(0, min(found, self.handed_over(prompt_tokens))) // self.align * self.align

    def handed_over(self, prompt_tokens: int) -> int:
        """Tokens of a prompt, but the last one, whose KV another worker can bring."""
        whole = min(prompt_tokens - 1, prompt_tokens // self.block_size * self.block_size - self.beyond)
        return max(0, whole) // self.align * self.align if self.boundaries else max(0, whole)


USUAL_BACKEND = "UCX"
"""The NIXL plug-in that moves KV unless operators choose another one."""


def with_backend(connector: str, backend: str) -> str:
    """``Fingerprint.connector`` of workers whose KV this plug-in moves."""
    return connector if backend == USUAL_BACKEND else f"{connector}/{backend}"


class Fingerprint(Message, frozen=True, kw_only=True):
    """Two workers exchange KV only when their fingerprints are equal."""

    model: str
    revision: str
    """Content digest or Hugging Face revision of the weights."""
    dtype: str
    block_size: int
    kv_layout: str
    """Cache layout and CPU ISA or GPU backend."""
    connector: str
    """Connector name and version, then what moves bytes, and its version; then NIXL's plug-in if it is another than
    ``USUAL_BACKEND``. They are separated by slashes.
    """
    engine_version: str
    options: str = ""
    """Further options that change KV or tokens, as ``name=value`` or ``name=digest``, separated by spaces."""
    weights: str = ""
    """Which update gave the engine its weights, in place; empty: they are those of its start."""

    @property
    def kv_backend(self) -> str:
        """NIXL's plug-in that moves KV, where NIXL does."""
        _connector, _nixl, *chosen = [*self.connector.split("/", 2), ""]
        return (chosen and chosen[0]) or USUAL_BACKEND

    def key(self) -> str:
        """The fingerprint as one string."""
        return f"{self.base_key()}|{self.weights}" if self.weights else self.base_key()

    def base_key(self) -> str:
        """As ``key``, whatever the weights: engines of one base key have the same memory, and may stay connected."""
        return "|".join(str(value) for value in msgspec.structs.astuple(self)[:-1])


ADAPTERS_MAX = 64
"""LoRA adapters that a worker loads at a time."""


class LoraAdapter(Message, frozen=True, kw_only=True):
    """A LoRA adapter that a worker has loaded. A request names it as its model."""

    name: str
    digest: str
    """SHA-256 of its files. Workers with other files under the same name do not share its KV."""
    hashed_as: str
    """The text that the engine hashes into every block of the adapter's requests, beside the name."""


KV_SPEEDS_MAX = 16
ADDRESSES_MAX = 16
"""Partners in a record whose KV the worker has read in a self-test; the newest are kept."""


KV_SPEED_MAX = 10**15
"""Bytes per second. A greater speed is none."""

GRANT_S_MAX = 60.0
"""No grant takes longer: a request that is not answered ends before."""


class KvMemory(StrEnum):
    """The memory that KV is read from and into."""

    CPU = "cpu"
    """One end at least is host memory."""
    CUDA = "cuda"
    """GPU memory at both ends."""


class KvReadSpeed(Message, frozen=True, kw_only=True):
    """How fast a worker read blocks of another one in their newest KV self-test, while neither served requests."""

    source_id: WorkerId
    """The worker that holds the blocks."""
    bytes_per_s: int
    """The best of a few reads."""
    memory: KvMemory
    way: str = ""
    """What moved the bytes: NIXL's plug-in and, for UCX between host memories, the transport that a process on the
    reader's host chose. Empty: unknown.
    """
    notice_s: float = 0.0
    """Seconds from a request for blocks to its grant, the best of a few, if the grant comes as a notification of NIXL;
    0.0: not known, as between engines of one machine, which need neither way.
    """
    bus_s: float = 0.0
    """Seconds from a request for blocks to its grant, the best of a few, if the grant comes over the bus."""

    @property
    def is_possible(self) -> bool:
        times = 0 <= self.notice_s <= GRANT_S_MAX and 0 <= self.bus_s <= GRANT_S_MAX
        return times and 0 <= self.bytes_per_s <= KV_SPEED_MAX


NOTICE_GAIN_S_MIN = 0.000_5
"""What looking for notifications of NIXL costs, a few percent of a core while a request waits, is worth that much
sooner a grant."""


def looks_for_notices(notice_s: float, bus_s: float) -> bool:
    """Whether a reader looks for grants among NIXL's notifications, where they take so long on both ways."""
    return bus_s - notice_s >= NOTICE_GAIN_S_MIN


class WorkerRecord(Message, frozen=True, kw_only=True):
    """The registry entry of a worker; it expires when the worker stops renewing it."""

    worker_id: WorkerId
    epoch: Epoch
    role: Role
    phase: WorkerPhase
    engine: str
    """vllm, simulated, attached or store."""
    models: list[str]
    """Model names that requests may use; the first is the primary name."""
    max_model_len: int
    fingerprint: Fingerprint
    hashing: HashScheme
    kv_tokens: int
    """Capacity of its engine's KV cache."""
    legs_max: int
    host: str
    pid: int
    wire_version: int
    note: str = ""
    prefix_caching: bool = True
    """Whether its engine caches prefixes. Without prefix caching the worker lends no KV by block hash: it is no KV
    source, readers do not follow it and no self-test reads from it. It still reads KV and hands off KV by an offer.
    """
    step_tokens_max: int = 2048
    """Maximum number of tokens that its engine computes in one step."""
    renders: bool = False
    """Whether it renders prompts for routers (see ``RenderPrompt``)."""
    adapters: list[LoraAdapter] = msgspec.field(default_factory=list)
    """LoRA adapters of its model that requests may name, at most ``ADAPTERS_MAX``."""
    adapters_at_once_max: int = 0
    """Different LoRA adapters in one batch of its engine; 0: it takes none."""
    paths: list[str] = msgspec.field(default_factory=list)
    """Paths of ``engine_paths.SERVED`` that the worker's engine serves; empty: not known."""
    kv_reads: list[KvReadSpeed] = msgspec.field(default_factory=list)
    """Speeds of reads in KV self-tests, one for each source, at most ``KV_SPEEDS_MAX``."""
    attached: bool = False
    """Whether it has no engine of its own and passes requests on to a server outside of Baton, of which neither tokens
    nor KV are known: it serves whole requests, is placed by load, and its streams cannot be continued elsewhere.
    """
    cache_hit_threshold: float = 0.0
    """The worker's default: it refuses a leg without a threshold if it has, or can fetch, less of the prompt."""
    ranks: int = 1
    """Ranks of its engine, over all pipeline stages: GPUs, where it has some."""
    listens: list[str] | None = None
    """Addresses other than loopback on which it and its engine accept connections, at most ``ADDRESSES_MAX``; None: not
    known.
    """
    kv_token_bytes: int = 0
    """Bytes of full attention that it reads for each token whose KV comes from another worker."""
    kv_boundary_bytes: int = 0
    """Bytes of windows and states that it reads besides, however many tokens come. Both are 0: not known."""

    @property
    def model(self) -> str:
        """The primary name of its model: for planning, metrics and tables."""
        return self.models[0] if self.models else ""

    def reads_from(self, registered: Collection[WorkerId]) -> list[KvReadSpeed]:
        """``kv_reads`` from these workers, one for each, whatever a faulty worker wrote."""
        possible = {one.source_id: one for one in self.kv_reads if one.is_possible}
        return [one for source, one in possible.items() if source in registered][:KV_SPEEDS_MAX]


class WorkerLost(Message, frozen=True, kw_only=True):
    """Orchestrator -> anyone: this epoch of the worker has ended. Its running legs have failed."""

    worker_id: WorkerId
    epoch: Epoch
    silent_s: float


class FleetWorker(Message, frozen=True, kw_only=True):
    """A worker as the orchestrator sees it."""

    record: WorkerRecord
    phase: WorkerPhase
    since_s: float
    """Seconds in this phase."""
    silent_s: float
    """Seconds since its last message."""
    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    """Fraction of KV blocks in use, 0.0 to 1.0."""


class FleetState(Message, frozen=True, kw_only=True):
    """Orchestrator -> anyone: the fleet, sent on each change and once a second."""

    leader: str
    term: int
    workers: list[FleetWorker]


class DescribeFleet(Message, frozen=True, kw_only=True):
    """Anyone -> orchestrator: requests the FleetState."""
