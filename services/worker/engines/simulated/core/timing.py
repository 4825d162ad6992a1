"""How long things take in the simulated engine."""

from __future__ import annotations

from services.worker.engines.simulated.core.settings import SimulationSettings


def step_s(
    settings: SimulationSettings, prefill_tokens: int, decoding: int, context_tokens: int, prefill_pairs: float = 0.0
) -> float:
    """Seconds of one engine step; ``context_tokens`` are those that the ``decoding`` sequences attend to, and
    ``prefill_pairs`` all earlier tokens of all that are computed.
    """
    seconds = 0.0
    if prefill_tokens:
        seconds += settings.sim_prefill_base_s + prefill_pairs * settings.sim_prefill_s_per_pair
        if settings.sim_prefill_tokens_per_s:
            seconds += prefill_tokens / settings.sim_prefill_tokens_per_s
    if decoding:
        seconds += settings.sim_decode_base_s
        seconds += (decoding - 1) * settings.sim_decode_per_sequence_s
        seconds += context_tokens * settings.sim_decode_per_context_token_s
    return seconds


class TransferLink:
    """The link through which KV arrives: transfers share it one after the other."""

    def __init__(self, settings: SimulationSettings) -> None:
        self._settings = settings
        self._free_at = 0.0

    def book(self, size_bytes: int, now: float) -> tuple[float, float]:
        """When a transfer that is asked for now begins and when it has arrived; the link is taken in between."""
        rate = self._settings.sim_transfer_bytes_per_s
        began = max(now, self._free_at)
        self._free_at = began + (size_bytes / rate if rate else 0.0)
        return began, self._free_at + self._settings.sim_transfer_base_s
