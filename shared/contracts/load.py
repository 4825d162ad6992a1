"""How busy and how fast a worker is: sent on change, at most ``LOAD_HZ_MAX`` times a second, at least once a second."""

from __future__ import annotations

import msgspec

from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import KvDigest
from shared.contracts.kv_exchange import KvExchangeState
from shared.contracts.message import Message, PackedMessage
from shared.contracts.workers import Role, WorkerPhase

LOAD_HZ_MAX = 10.0
LOAD_PERIOD_S_MAX = 1.0


class StepTotals(Message, frozen=True, kw_only=True):
    """What an engine's steps have computed since it started, and how long they took."""

    seconds: float = 0.0
    """Spent in steps; idle time does not count."""
    prefill_steps: int = 0
    """Steps that computed prompt tokens."""
    prefill_tokens: int = 0
    """Prompt tokens computed, counted in the step that computed them, and again after a preemption."""
    prefill_pairs: float = 0.0
    """For each of these tokens, the tokens before it in its prompt."""
    decode_steps: int = 0
    """Steps that decoded at least one request."""
    decode_requests: int = 0
    """Requests decoded, summed over those steps."""
    decode_context_tokens: int = 0
    """Tokens that these requests attended to, summed over those steps."""


NO_STEP_TOTALS = StepTotals()


class EngineSpeed(PackedMessage, frozen=True, kw_only=True):
    """How long the engine's steps take, as its worker has learned from ``StepTotals`` (see ``shared.engine_speed``).

    Seconds for one of each. A phase without samples has the prior's parameters.
    """

    prefill_step_s: float
    """Each step that computes prompt tokens, however few."""
    prefill_token_s: float
    prefill_pair_s: float
    """Each earlier token that a computed token attends to (the square in attention)."""
    decode_step_s: float
    decode_request_s: float
    """Each request in the batch of a decode step."""
    decode_context_token_s: float
    """Each token of context of these requests."""
    prefill_samples: float
    """Samples that the prefill parameters rest on; a sample of mixed steps counts for each phase by its share."""
    decode_samples: float
    batch_spread: float
    """Standard deviation of the logarithm of what a request in the batch costs, its context included. It is large where
    batches have hardly varied: then a step's own cost cannot be separated from that of its requests.
    """
    pairs_per_token: float = 0.0
    """Earlier tokens that a computed prompt token attended to, lately and on average."""


class StoreState(Message, frozen=True, kw_only=True):
    """What a store holds, and what it has done since it started. Blocks are in memory (host), in files (disk), or in a
    bucket (object).
    """

    block_bytes: int = 0
    """Size of one whole block; of several KV cache groups, of the largest one's, for which all take as much room."""
    host_blocks: int = 0
    host_blocks_max: int = 0
    """Capacity of its memory."""
    disk_blocks: int = 0
    disk_blocks_max: int = 0
    """Capacity of its files."""
    disk_free_bytes: int = -1
    """Free space of the file system with the store's files; -1 without files."""
    object_blocks: int = 0
    object_blocks_max: int = 0
    """Capacity of its bucket."""
    objects_silent_s: float = 0.0
    """Time since the first call of the object store that failed without a good one since; 0: the last one was good."""
    loads_waiting: int = 0
    """Requested blocks that are not in memory."""
    saves_waiting: int = 0
    """Blocks in memory that are not yet in files, and those not yet in the bucket."""
    loaded_blocks_total: int = 0
    saved_blocks_total: int = 0
    damaged_blocks_total: int = 0
    """Blocks that could not be read back unchanged: dropped, never served."""
    unsaved_blocks_total: int = 0
    """Blocks that could not be written to files, or to the bucket."""
    evicted_host_blocks_total: int = 0
    """Blocks evicted from memory to make room."""
    evicted_disk_blocks_total: int = 0
    evicted_object_blocks_total: int = 0
    granted_bytes_total: int = 0
    """Granted to readers; a block granted twice counts twice."""


ENGINE_SILENT_S_MAX = 30.0
"""A worker whose engine is silent for longer gets no new requests. Engines answer while they compute a step."""


LOOP_LATE_S_MAX = 3.0
"""A worker whose event loop is held for longer gets no new requests; neither would one that is silent for so long."""


class WorkerLoad(Message, frozen=True, kw_only=True):
    """What routers read of a ``LoadReport``. Each worker sends ten a second, and most of the time that one takes is
    spent on making its objects.
    """

    worker_id: WorkerId
    epoch: Epoch
    role: Role
    phase: WorkerPhase
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    """Prompt tokens accepted and not yet computed."""
    legs: int = 0
    """Legs being served; a leg counts once for each of its sequences."""
    kv_tokens_used: int = 0
    """Tokens in the engine's KV cache; where groups of layers need different memory, its used share of the total."""
    kv_tokens_total: int = 0
    digest: KvDigest | None = None
    computed_tokens_total: int = 0
    """Prompt tokens that this engine computed itself."""
    cached_tokens_total: int = 0
    """Prompt tokens found in the local prefix cache."""
    received_tokens_total: int = 0
    """Prompt tokens whose KV came from another worker."""
    received_seconds_total: float = 0.0
    exchange: Message | None = None
    """What the engine leases and reads; None where the engine's connector does not report it."""
    speed: EngineSpeed | None = None
    """None before the first measurement."""
    engine_silent_s: float = 0.0
    """For how long the engine has answered no call of its worker, although it should; see ``ENGINE_SILENT_S_MAX``."""
    loop_late_s: float = 0.0
    """Seconds for which the worker's event loop has been held by now. A thread then repeats the last report, without
    its digest; see ``LOOP_LATE_S_MAX``.
    """

    @property
    def can_serve(self) -> bool:
        """Whether the worker takes new requests, as far as its own state says."""
        return (
            self.phase is WorkerPhase.READY
            and self.engine_silent_s <= ENGINE_SILENT_S_MAX
            and self.loop_late_s <= LOOP_LATE_S_MAX
        )

    @property
    def kv_used(self) -> float:
        """Share of the engine's KV cache in use, 0.0 to 1.0."""
        return self.kv_tokens_used / self.kv_tokens_total if self.kv_tokens_total else 0.0


class LoadReport(WorkerLoad, frozen=True, kw_only=True):
    """Worker -> all services: how busy it is; also the sign that it lives. Totals count from the epoch's start."""

    prompt_tokens_total: int = 0
    """Prompt tokens of finished prompts, cached or not."""
    received_bytes_total: int = 0
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    prefill_tokens_per_s: float = 0.0
    """Moving average; 0 before the first sample."""
    decode_s_per_token: float = 0.0
    """Moving average of the time between tokens of one stream; 0 before the first sample."""
    exchange: KvExchangeState | None = None
    steps: StepTotals | None = None
    """None where the engine does not report its steps."""
    store: StoreState | None = None
    """Set by stores only."""
    adapters_running: list[str] = msgspec.field(default_factory=list)
    """LoRA adapters of the requests in the engine's batch."""
    adapters_waiting: list[str] = msgspec.field(default_factory=list)
    """LoRA adapters of the requests in the engine's queue."""
