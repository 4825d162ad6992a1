"""How long would it take there? Predicted seconds from what each worker measured about itself."""

from __future__ import annotations

from services.router.core.cluster_view import WorkerView

PREFILL_TOKENS_PER_S_UNKNOWN = 4000.0
"""Assumed until some worker of the fingerprint has measured itself."""
DECODE_S_PER_TOKEN_UNKNOWN = 0.02
TRANSFER_S_PER_TOKEN_UNKNOWN = 5e-6
"""Reading a token's KV from another worker."""
LEASE_S = 0.005
"""Asking another worker for its blocks, to its answer. More than what counts as a tie, or prompts would leave the
worker that holds them for one that is no better.
"""
TOKENS_OUT_UNKNOWN = 256
"""Completion length assumed when the client sets no limit."""
TOKENS_OUT_COUNTED_MAX = 1024
"""Limits are set generously and seldom reached: more than this is not believed."""
BATCH_SLOWDOWN = 0.02
"""By how much each further request in a batch slows a decode step."""


def queue_s(view: WorkerView) -> float:
    """Until a new prompt is begun."""
    return view.waiting_tokens / prefill_speed(view)


def prefill_s(view: WorkerView, tokens: int) -> float:
    """To compute ``tokens`` prompt tokens that are not cached."""
    return tokens / prefill_speed(view)


def prefill_speed(view: WorkerView) -> float:
    """Prompt tokens per second."""
    measured = view.load.prefill_tokens_per_s if view.load is not None else 0.0
    return measured or view.like.prefill_tokens_per_s or PREFILL_TOKENS_PER_S_UNKNOWN


def transfer_s(view: WorkerView, tokens: int) -> float:
    """To read the KV of ``tokens`` tokens from the prefill worker."""
    load = view.load
    if load is not None and load.received_tokens_total and load.received_seconds_total > 0:
        return tokens * load.received_seconds_total / load.received_tokens_total
    return tokens * TRANSFER_S_PER_TOKEN_UNKNOWN


def fetch_s(view: WorkerView, tokens: int) -> float:
    """To ask for the KV of ``tokens`` tokens before computing the rest, and to read it."""
    return LEASE_S + transfer_s(view, tokens)


def decode_s(view: WorkerView, tokens_in: int, tokens_out: int) -> float:
    """To generate the completion in the batch it would join; a full KV cache costs the wait for another to end."""
    measured = view.load.decode_s_per_token if view.load is not None else 0.0
    unhindered = measured or view.like.decode_s_per_token or DECODE_S_PER_TOKEN_UNKNOWN
    step = unhindered * (1.0 + BATCH_SLOWDOWN * (view.running + 1))
    counted = min(tokens_out or TOKENS_OUT_UNKNOWN, TOKENS_OUT_COUNTED_MAX)
    alone = counted * step
    return alone if _has_room(view, tokens_in + counted) else 2.0 * alone


def _has_room(view: WorkerView, tokens: int) -> bool:
    load = view.load
    if load is None or not load.kv_blocks_total:
        return True
    return tokens <= (load.kv_blocks_total - load.kv_blocks_used) * view.record.fingerprint.block_size
