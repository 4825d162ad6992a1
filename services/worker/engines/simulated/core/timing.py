"""Step-time model of the simulated engines, used by simulated workers and by the replay."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """Speeds of a simulated engine and its link. A rate of 0 means that the work takes no time."""

    prefill_tokens_per_s: float
    prefill_base_s: float
    """Added to a step that computes any prompt token."""
    prefill_s_per_pair: float
    """For each earlier token that a computed token attends to."""
    decode_base_s: float
    """Duration of a step in which one sequence decodes."""
    decode_per_sequence_s: float
    """For each further decoding sequence."""
    decode_per_context_token_s: float
    """For each token of context, of all decoding sequences."""
    transfer_bytes_per_s: float
    """Bandwidth of the one link through which KV arrives."""
    transfer_base_s: float
    """Latency of a transfer; it does not occupy the link."""
    kv_bytes_per_token: int

    def prefill_s(self, tokens: float, pairs: float) -> float:
        """Seconds to compute ``tokens`` that attend to ``pairs`` earlier tokens in sum, without ``prefill_base_s``."""
        seconds = self.prefill_s_per_pair * pairs
        return seconds + tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else seconds

    def decode_s(self, sequences: int, context_tokens: float) -> float:
        """Seconds of the decode part of a step with at least one decoding sequence."""
        return (
            self.decode_base_s
            + (sequences - 1) * self.decode_per_sequence_s
            + context_tokens * self.decode_per_context_token_s
        )

    def step_s(self, prefill_tokens: int, prefill_pairs: float, decoding: int, context_tokens: float) -> float:
        """Seconds of one step."""
        seconds = 0.0
        if prefill_tokens:
            seconds += self.prefill_base_s + self.prefill_s(prefill_tokens, prefill_pairs)
        if decoding:
            seconds += self.decode_s(decoding, context_tokens)
        return seconds

    def occupies_s(self, size_bytes: int) -> float:
        """Seconds for which a transfer occupies the link."""
        return size_bytes / self.transfer_bytes_per_s if self.transfer_bytes_per_s else 0.0


class TransferLink:
    """The link through which KV arrives. Transfers use it one after another."""

    def __init__(self, timing: StepTiming) -> None:
        self._timing = timing
        self.free_at = 0.0

    def book(self, size_bytes: int, now: float) -> tuple[float, float]:
        """Queue a transfer at ``now``; returns when it begins and when its last byte has arrived."""
        began = max(now, self.free_at)
        self.free_at = began + self._timing.occupies_s(size_bytes)
        return began, self.free_at + self._timing.transfer_base_s
