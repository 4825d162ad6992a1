"""Workers as the rest of the system knows them: the registry record and the fleet."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.message import Message

WORKER_RECORD_TTL_S = 10.0
"""A record that is not renewed for so long expires. All sides open the channel with it; workers renew more often."""


class Role(StrEnum):
    """Which legs a worker is placed for. Every engine can do both; a store has no engine."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    STORE = "store"
    """Keeps copies of KV blocks and serves them to others; no legs."""


class WorkerPhase(StrEnum):
    """Where a worker is in its life, as it says itself (LOST is said by the orchestrator)."""

    STARTING = "starting"
    PROBING = "probing"
    """Its engine runs; it proves that it can exchange KV before it gets traffic."""
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"
    LOST = "lost"


class HashScheme(Message, frozen=True, kw_only=True):
    """How the engine names its KV blocks; a router that follows it computes the same chain."""

    algorithm: str = "sha256_cbor"
    seed: str = "vllm-none-hash"
    """The string whose hash is the parent of the first block."""
    block_size: int
    """Tokens in a block."""


class Fingerprint(Message, frozen=True, kw_only=True):
    """What must be equal for two workers to exchange KV."""

    model: str
    revision: str
    """Content digest or hub revision of the weights."""
    dtype: str
    block_size: int
    kv_layout: str
    """Cache layout and CPU ISA or GPU backend."""
    connector: str
    """Connector name and version."""
    engine_version: str

    def key(self) -> str:
        """One string that is equal for equal fingerprints."""
        return "|".join(str(value) for value in msgspec.structs.astuple(self))


class WorkerRecord(Message, frozen=True, kw_only=True):
    """The registry entry of a worker; it expires when the worker no longer renews it."""

    worker_id: WorkerId
    epoch: Epoch
    role: Role
    phase: WorkerPhase
    engine: str
    """vllm or simulated."""
    models: list[str]
    """Names that requests may ask for; the first is the main one."""
    max_model_len: int
    fingerprint: Fingerprint
    hashing: HashScheme
    kv_blocks: int
    legs_max: int
    """Legs this worker accepts at a time."""
    host: str
    pid: int
    wire_version: int
    note: str = ""
    prefix_caching: bool = True
    """Whether its engine finds earlier prompts again. If not, it lends no KV by block hash: it is no source, it is not
    followed, and no self-test reads from it. It still reads KV, and hands off a prompt's KV by an offer."""
    step_tokens_max: int = 2048
    """Tokens that its engine computes in one step."""


class WorkerLost(Message, frozen=True, kw_only=True):
    """Orchestrator -> anyone: this life of the worker is over; place nothing there, fail what waits for it."""

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
    """Seconds since it was last heard."""
    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    """0.0 to 1.0."""


class FleetState(Message, frozen=True, kw_only=True):
    """Orchestrator -> anyone: the fleet, on each change and once a second."""

    leader: str
    term: int
    workers: list[FleetWorker]


class DescribeFleet(Message, frozen=True, kw_only=True):
    """Anyone -> orchestrator: who is there? Answered with FleetState."""
