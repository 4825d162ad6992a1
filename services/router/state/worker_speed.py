"""How fast a worker is, as placement computes with it."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from shared.contracts.workers import WorkerRecord
from shared.engine_speed.steps import DEFAULT_STEP_TIMES

TOKEN_BYTES: Final = 131_072
"""KV of a token, where a worker does not say: that of an 8-billion-parameter model."""


class KvSizes(NamedTuple):
    """What a worker reads of another one's KV, in bytes."""

    token: int
    boundary: int
    """Windows and states, however many tokens are read."""

    def of(self, tokens: int) -> int:
        """Size of a read of so many tokens."""
        return self.boundary + self.token * tokens


UNKNOWN_SIZES: Final = KvSizes(TOKEN_BYTES, 0)


def sizes_of(record: WorkerRecord) -> KvSizes:
    sizes = KvSizes(record.kv_token_bytes, record.kv_boundary_bytes)
    return sizes if any(sizes) else UNKNOWN_SIZES


class WorkerSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds for one of each. The defaults hold until the worker, or one like it, has been measured."""

    prefill_step_s: float = DEFAULT_STEP_TIMES.prefill_step_s
    """Each step that computes prompt tokens, however few."""
    prefill_token_s: float = DEFAULT_STEP_TIMES.prefill_token_s
    prefill_pair_s: float = 0.0
    """Each earlier token that a computed token attends to (the square in attention)."""
    decode_step_s: float = DEFAULT_STEP_TIMES.decode_step_s
    decode_request_s: float = DEFAULT_STEP_TIMES.decode_request_s
    """Each request in the batch of a decode step."""
    decode_context_token_s: float = 0.0
    """Each token of context of these requests."""
    transfer_base_s: float = 0.005
    """Seconds from the request for KV of another worker to its reply, and of reading what comes with any number of
    tokens: windows and states.
    """
    transfer_token_s: float = 5e-6
    """Reading one token's KV."""
    pairs_per_token: float = 0.0
    """Earlier tokens that a computed prompt token attended to, lately and on average: for prompts of unknown length."""
    transit_s: float = 0.002
    """From the start of a leg to its first token at the router, minus the time that the engine measured."""
    prompts_measured: float = 0.0
    """1 if the worker, or one like it, has measured what prompts take; else 0."""
