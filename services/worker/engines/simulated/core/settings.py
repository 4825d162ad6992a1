"""Settings of a simulated engine: sizes, speeds, and the step-time model, which the replay uses, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from services.worker.engines.simulated.core.step_models import (
    FOREVER,
    NOISE_STEPS,
    StepModelName,
    noise_factor,
    roofline_s,
    roofline_steps_alike,
    table_s,
    table_steps_alike,
)


class SimulatedTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Simulated speeds, and how KV bytes are moved. A speed of 0 means that the work takes no time."""

    sim_prefill_tokens_per_s: float = 8000.0
    sim_prefill_base_s: float = 0.002
    """Seconds that any prefill adds to a step."""
    sim_prefill_s_per_pair: float = 0.0
    """Seconds for each earlier token that a computed one attends to."""
    sim_decode_base_s: float = 0.004
    """Seconds of one decode step, with one sequence."""
    sim_decode_per_sequence_s: float = 0.0001
    """Seconds that each further sequence adds to a decode step."""
    sim_decode_per_context_token_s: float = 0.0
    """Seconds that each token of context, of all sequences, adds to a decode step."""
    sim_step_model: StepModelName = "linear"
    """How these times make a step's. linear: their sum; roofline: the longer of compute and memory; table: they do not
    count, a step takes what published measurements of an 8-billion-parameter model on an H100 say.
    """
    sim_speed: float = 1.0
    """Speed of this engine's steps: 0.5 makes each take twice as long."""
    sim_noise: float = 0.0
    """Standard deviation of the logarithm of a step's time; 0.1 is about ten per cent."""
    sim_transfer_bytes_per_s: float = 2e9
    """Bandwidth of the one link through which KV arrives."""
    sim_transfer_base_s: float = 0.001
    """Seconds until the first byte of a transfer arrives."""
    sim_kv_bytes_per_token: int = 4096
    sim_transfer: Literal["auto", "memory", "tcp", "nixl"] = "auto"
    """What copies the bytes. memory: within this process only; auto: NIXL if it is installed, otherwise TCP."""

    def step_timing(self, noise_seed: int = 0) -> StepTiming:
        """The speeds among these settings."""
        names = StepTiming.__dataclass_fields__.keys() - {"noise_seed"}
        return StepTiming(**{name: getattr(self, f"sim_{name}") for name in names}, noise_seed=noise_seed)


class SimulationSettings(SimulatedTiming, frozen=True, kw_only=True):
    """Settings of one simulated engine. Raises ValueError for values that cannot work."""

    worker_id: str = "simulated"
    host: str = "127.0.0.1"
    """Address on which the TCP transfer agent listens."""
    epoch: int = 0
    """Epoch of the worker, which with its id identifies this engine to KV peers."""
    kv_lease_s: float = 30.0
    kv_lease_share_max: float = 0.5
    """Share of the KV blocks that leases may pin."""
    block_size: int = 32
    """Tokens in a KV block."""
    kv_blocks: int = 8192
    max_model_len: int = 131_072
    max_num_batched_tokens: int = 2048
    """Tokens computed in one step, at most."""
    max_num_seqs: int = 256
    """Sequences in one step, at most."""
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("block_size", "kv_blocks", "max_model_len", "max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.sim_speed > 0:
            raise ValueError(f"sim_speed must be above 0, got {self.sim_speed}")
        sizes = (name for name in SimulatedTiming.__struct_fields__ if name not in {"sim_transfer", "sim_step_model"})
        if any(getattr(self, name) < 0 for name in sizes):
            raise ValueError("a simulated speed, time or size cannot be negative")
        if self.max_model_len > self.kv_blocks * self.block_size:
            raise ValueError(
                f"max_model_len {self.max_model_len} does not fit into {self.kv_blocks} KV blocks of {self.block_size}"
                " tokens: lower it or raise the KV cache"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """Speeds of a simulated engine and its link. A rate of 0 means that the work takes no time."""

    prefill_tokens_per_s: float
    prefill_base_s: float
    """Seconds that any prompt token adds to a step."""
    prefill_s_per_pair: float
    """Seconds for each earlier token that a computed token attends to."""
    decode_base_s: float
    """Seconds of a step in which one sequence decodes."""
    decode_per_sequence_s: float
    """Seconds for each further decoding sequence."""
    decode_per_context_token_s: float
    """Seconds for each token of context, of all decoding sequences."""
    transfer_bytes_per_s: float
    """Bandwidth of the one link through which KV arrives."""
    transfer_base_s: float
    """Latency of a transfer; it does not occupy the link."""
    step_model: StepModelName = "linear"
    """How the times above make a step's; see ``step_models``."""
    speed: float = 1.0
    """Divides all step times."""
    noise: float = 0.0
    """Standard deviation of the logarithm of a step's time."""
    noise_seed: int = 0

    def step_s(self, prefill_tokens: int, prefill_pairs: float, decoding: int, context_tokens: float) -> float:
        """Seconds of one step without noise: ``prefill_tokens`` that attend to ``prefill_pairs`` earlier tokens in sum,
        and ``decoding`` sequences of ``context_tokens`` in sum.
        """
        if self.step_model == "table":
            return table_s(prefill_tokens, prefill_pairs, decoding, context_tokens) / self.speed
        if self.step_model == "roofline":
            return roofline_s(self, prefill_tokens, prefill_pairs, decoding, context_tokens) / self.speed
        seconds = 0.0
        if prefill_tokens:
            seconds += self.prefill_base_s + self.compute_s(prefill_tokens, prefill_pairs)
        if decoding:
            seconds += (
                self.decode_base_s
                + (decoding - 1) * self.decode_per_sequence_s
                + context_tokens * self.decode_per_context_token_s
            )
        return seconds / self.speed

    def compute_s(self, tokens: float, pairs: float) -> float:
        """Seconds that so many tokens take at ``prefill_tokens_per_s`` and ``prefill_s_per_pair``."""
        seconds = self.prefill_s_per_pair * pairs
        return seconds + tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else seconds

    def decode_s(self, sequences: int, context_tokens: float) -> float:
        """Seconds of a step in which sequences only decode."""
        return self.step_s(0, 0.0, sequences, context_tokens)

    def steps_alike(self, step: int, decoding: int, context_tokens: int) -> int:
        """How many decode-only steps, beginning with number ``step``, share their noise and grow by equal times."""
        alike = FOREVER
        if self.step_model == "table":
            alike = table_steps_alike(decoding, context_tokens)
        elif self.step_model == "roofline":
            alike = roofline_steps_alike(self, decoding, context_tokens)
        return min(alike, NOISE_STEPS - step % NOISE_STEPS) if self.noise else alike

    def noise_of(self, step: int) -> float:
        """What the time of an engine's step with this number is multiplied by."""
        return noise_factor(self.noise, self.noise_seed, step) if self.noise else 1.0

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
