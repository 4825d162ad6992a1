"""What a simulated engine is like: its size and its speed."""

from __future__ import annotations

import msgspec


class SimulatedTiming(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a simulated engine pretends to be. A speed of 0 means that the thing takes no time."""

    sim_prefill_tokens_per_s: float = 8000.0
    sim_prefill_base_s: float = 0.002
    """Seconds that any prefill adds to a step."""
    sim_decode_base_s: float = 0.004
    """Seconds of one decode step, with one sequence."""
    sim_decode_per_sequence_s: float = 0.0001
    """Seconds that each further sequence adds to a decode step."""
    sim_decode_per_context_token_s: float = 0.0
    """Seconds that each token of context, of all sequences, adds to a decode step."""
    sim_transfer_bytes_per_s: float = 2e9
    """Of the one link through which KV arrives."""
    sim_transfer_base_s: float = 0.001
    """Seconds until the first byte of a transfer arrives."""
    sim_kv_bytes_per_token: int = 4096


class SimulationSettings(SimulatedTiming, frozen=True, kw_only=True):
    """One simulated engine. Raises ValueError when it cannot work."""

    engine_id: str = "simulated"
    """Names this engine in the KV transfers that it offers."""
    block_size: int = 32
    """Tokens in a KV block."""
    kv_blocks: int = 8192
    max_model_len: int = 131_072
    max_num_batched_tokens: int = 2048
    """Tokens computed in one step, at most."""
    max_num_seqs: int = 256
    """Sequences in one step, at most."""

    def __post_init__(self) -> None:
        for name in ("block_size", "kv_blocks", "max_model_len", "max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if any(getattr(self, name) < 0 for name in self.__struct_fields__ if name.startswith("sim_")):
            raise ValueError("a simulated speed, time or size cannot be negative")
        if self.max_model_len > self.kv_blocks * self.block_size:
            raise ValueError(
                f"max_model_len {self.max_model_len} does not fit into {self.kv_blocks} KV blocks of {self.block_size}"
                " tokens: lower it or raise the KV cache"
            )
