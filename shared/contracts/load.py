"""How busy a worker is: sent when it changes, at most ``LOAD_HZ_MAX`` times a second, at least once a second."""

from __future__ import annotations

from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import KvDigest
from shared.contracts.kv_exchange import KvLedgerState
from shared.contracts.message import Message
from shared.contracts.workers import Role, WorkerPhase

LOAD_HZ_MAX = 10.0
LOAD_PERIOD_S_MAX = 1.0


class StepTotals(Message, frozen=True, kw_only=True):
    """What an engine's steps have computed since it started, and how long they took.

    A step's duration is a sum over what it computes, so the difference of any two such totals is one equation of the
    engine's speeds, whatever was batched together in between.
    """

    seconds: float = 0.0
    """Spent in steps; an idle engine's do not grow."""
    prefill_steps: int = 0
    """Steps that computed prompt tokens."""
    prefill_tokens: int = 0
    """Prompt tokens computed, in the step that did it, again after a preemption."""
    prefill_pairs: float = 0.0
    """For each of them, the tokens before it in its prompt."""
    decode_steps: int = 0
    """Steps in which completions went on."""
    decode_requests: int = 0
    """Of those steps, the completions in each, added up."""
    decode_context_tokens: int = 0
    """Of those steps, the tokens that these completions attended to, added up."""


class StoreState(Message, frozen=True, kw_only=True):
    """What a store keeps, and what it has done since it started. In memory is host, in files is disk."""

    block_bytes: int = 0
    """Of one block, whole."""
    host_blocks: int = 0
    disk_blocks: int = 0
    disk_blocks_max: int = 0
    """What its files have room for; what memory has is the report's ``kv_blocks_total``."""
    disk_free_bytes: int = -1
    """On the file system that its files are on; -1 when it has none."""
    loads_waiting: int = 0
    """Blocks that were asked for and lie in files alone."""
    saves_waiting: int = 0
    """Blocks that arrived in memory and are not in files yet."""
    loaded_blocks_total: int = 0
    saved_blocks_total: int = 0
    damaged_blocks_total: int = 0
    """Blocks that could not be read back from files as they were written: forgotten, never given."""
    unsaved_blocks_total: int = 0
    """Blocks that could not be written to files: they are in memory alone."""
    evicted_host_blocks_total: int = 0
    """Blocks that made room for others."""
    evicted_disk_blocks_total: int = 0
    granted_bytes_total: int = 0
    """Given to readers: a block that is granted twice counts twice."""


class LoadReport(Message, frozen=True, kw_only=True):
    """Worker -> everyone: how busy it is, and that it lives. Totals count from the epoch's start."""

    worker_id: WorkerId
    epoch: Epoch
    role: Role
    phase: WorkerPhase
    running: int = 0
    """Requests in the engine's batch."""
    waiting: int = 0
    """Requests in the engine's queue."""
    waiting_tokens: int = 0
    """Prompt tokens accepted and not yet computed."""
    legs: int = 0
    """Legs being served."""
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    digest: KvDigest | None = None
    prompt_tokens_total: int = 0
    """Prompt tokens of finished prompts, cached or not."""
    computed_tokens_total: int = 0
    """Prompt tokens that this engine computed itself."""
    cached_tokens_total: int = 0
    """Prompt tokens found in the local prefix cache."""
    received_tokens_total: int = 0
    """Prompt tokens whose KV came from another worker."""
    received_bytes_total: int = 0
    received_seconds_total: float = 0.0
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    prefill_tokens_per_s: float = 0.0
    """Measured lately; 0 before the first sample."""
    decode_s_per_token: float = 0.0
    """Measured lately: time between tokens of one stream; 0 before the first sample."""
    exchange: KvLedgerState | None = None
    """What its engine leases and reads; None where the engine's connector does not tell."""
    steps: StepTotals | None = None
    """From which routers learn how fast the engine is; None where it does not tell."""
    store: StoreState | None = None
    """What a store keeps; None of whoever is none."""
