"""What a worker's speed comes to: the numbers from which every prediction is made."""

from __future__ import annotations

import msgspec

from shared.engine_speed import USUAL


class EngineSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. The defaults are assumed of a worker until it, or one like it, has been measured."""

    prefill_base_s: float = USUAL.prefill_step_s
    """For each step that computes prompt tokens, however few."""
    prefill_s_per_token: float = USUAL.prefill_token_s
    prefill_s_per_pair: float = 0.0
    """For each earlier token that a computed token attends to (the square in attention)."""
    decode_base_s: float = USUAL.decode_step_s
    """One step of a batch of one."""
    decode_s_per_request: float = USUAL.decode_request_s
    """By how much each request in the batch slows the step."""
    decode_s_per_context_token: float = 0.0
    """By how much each token of context, of all requests in the batch, slows the step."""
    transfer_base_s: float = 0.005
    """Asking another worker for KV, to its answer."""
    transfer_s_per_token: float = 5e-6
    """Reading a token's KV from another worker."""
    pairs_per_token: float = 0.0
    """Earlier tokens that a computed prompt token attended to, lately and on average: for prompts not known better."""
    way_s: float = 0.002
    """From the start of a leg to its first token at the router, beside what the engine had of it."""
