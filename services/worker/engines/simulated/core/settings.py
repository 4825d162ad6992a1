"""Settings of a simulated engine: named profiles of speeds, and the step-time model, which the replay uses, too."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Annotated, Literal

import msgspec

from services.worker.engines.simulated.core.groups import Kind, OtherGroups, other_groups
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
from shared.contracts.workers import USUAL_BACKEND

Transfer = Literal["tcp", "nixl", "auto", "memory"]
NotNegative = Annotated[float, msgspec.Meta(ge=0.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """Speeds of a simulated engine and its link. A rate of 0 means that the work takes no time."""

    prefill_tokens_per_s: NotNegative = 8000.0
    prefill_base_s: NotNegative = 0.002
    """Seconds added to a step that computes any prompt token."""
    prefill_s_per_pair: NotNegative = 0.0
    """Seconds for each earlier token that a computed token attends to."""
    decode_base_s: NotNegative = 0.004
    """Duration of a step in which one sequence decodes."""
    decode_per_sequence_s: NotNegative = 0.0001
    """Seconds that each further decoding sequence adds to a step."""
    decode_per_context_token_s: NotNegative = 0.0
    """Seconds that each token of context, of all decoding sequences, adds to a step."""
    transfer_bytes_per_s: NotNegative = 2e9
    """Bandwidth of the one link through which KV arrives."""
    transfer_base_s: NotNegative = 0.001
    """Latency of a transfer; it does not occupy the link."""
    step_model: StepModelName = "linear"
    """How these times make a step's. linear: their sum; roofline: the longer of compute and memory; table: they do not
    count, a step takes what published measurements of an 8-billion-parameter model on an H100 say.
    """
    speed: Annotated[float, msgspec.Meta(gt=0.0)] = 1.0
    """Divides all step times: 0.5 makes each step take twice as long."""
    noise: NotNegative = 0.0
    """Standard deviation of the logarithm of a step's time; 0.1 is about ten per cent."""
    noise_seed: int = 0
    """Which noise; 0: an engine makes it of its worker's id."""

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
        """Seconds that ``tokens`` take which attend to ``pairs`` earlier ones in sum."""
        seconds = self.prefill_s_per_pair * pairs
        return seconds + tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else seconds

    def decode_s(self, sequences: int, context_tokens: float) -> float:
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
        return size_bytes / self.transfer_bytes_per_s if self.transfer_bytes_per_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedProfile(StepTiming):
    """What an operator chooses for simulated engines: see ``read_profile``."""

    groups: Kind = "full"
    """What the model's layers are. full: all have full attention; window: most have a sliding window; state: most have
    a recurrent state.
    """
    kv_bytes_per_token: Annotated[int, msgspec.Meta(ge=0)] = 4096
    """Bytes of full attention. A block of a window or with a state is as large as one of full attention, as in vLLM."""
    transfer: Transfer = "tcp"
    """What copies the bytes. auto: NIXL if it is installed, otherwise TCP; memory: within this process only. NIXL
    imports torch, with which a worker takes three times as long to start.
    """


PROFILES = {
    "default": SimulatedProfile(),
    "instant": SimulatedProfile(
        prefill_tokens_per_s=0.0,
        prefill_base_s=0.0,
        decode_base_s=0.0,
        decode_per_sequence_s=0.0,
        transfer_bytes_per_s=0.0,
        transfer_base_s=0.0,
    ),
    # An 8-billion-parameter model with grouped-query attention (32 layers, 8 KV heads of 128, hidden 4,096) in bf16 on
    # a GPU with 989 TFLOP/s, 3.35 TB/s and 80 GB, one per worker, and 200 Gbit/s of network each. From first principles
    # at 40 % of the peak in prefill and 60-80 % of the bandwidth in decode, as serving engines reach:
    #   prefill: 2 x 8e9 FLOP = 16 GFLOP per token / 396 TFLOP/s -> 24,600 tokens/s, and for attention 4 x 32 x 4,096
    #     FLOP per earlier token -> 1.3 ns, so a prompt of 12,000 tokens takes 0.6 s and one of 40,000 takes 2.7 s;
    #   decode: 16 GB of weights / 3.35 TB/s / 60 % -> 8 ms a step; 128 KiB of KV per token of context -> 60 ns.
    "8b": SimulatedProfile(
        prefill_tokens_per_s=24_600.0,
        prefill_s_per_pair=1.3e-9,
        decode_base_s=0.008,
        decode_per_sequence_s=0.000_05,
        decode_per_context_token_s=6e-8,
        transfer_bytes_per_s=25e9,
        transfer_base_s=0.002,
        kv_bytes_per_token=131_072,
    ),
    # A 70-billion-parameter model (80 layers, 8 KV heads of 128, hidden 8,192) on four of the same GPUs.
    "70b": SimulatedProfile(
        prefill_tokens_per_s=10_000.0,
        prefill_s_per_pair=1.8e-9,
        decode_base_s=0.018,
        decode_per_sequence_s=0.000_1,
        decode_per_context_token_s=4e-8,
        transfer_bytes_per_s=100e9,
        transfer_base_s=0.002,
        kv_bytes_per_token=327_680,
    ),
    # Qwen3-Next: 80 billion parameters, of which a token uses 3 billion, in fp8 on two of the same GPUs. Of 48 layers
    # 12 have full attention (2 KV heads of 256, 24 KiB of KV in bf16 for a token), 36 a recurrent state, in three
    # groups: a block of 512 tokens and a group's state take 12.6 MB each. Of 2 x 80 GB x 0.9, weights and activations
    # leave 56 GB.
    #   prefill: 6 GFLOP per token / (2 x 989 TFLOP/s x 25 %, as a mixture of experts reaches) -> 82,000 tokens/s; 12 x
    #     4 x 4,096 FLOP per earlier token -> 0.4 ns;
    #   decode: 5 ms a step, as little as its 48 layers take; each sequence reads further experts, up to all 80 GB in 20
    #     ms; 24 KiB per token of context / 6.7 TB/s / 80 % -> 5 ns.
    "80b-a3b": SimulatedProfile(
        prefill_tokens_per_s=82_000.0,
        prefill_s_per_pair=4e-10,
        decode_base_s=0.005,
        decode_per_sequence_s=0.000_1,
        decode_per_context_token_s=5e-9,
        transfer_bytes_per_s=50e9,
        transfer_base_s=0.002,
        kv_bytes_per_token=24_576,
        groups="state",
    ),
}


def read_profile(text: str) -> SimulatedProfile:
    """A profile by its name, and values that differ from it, such as ``8b,speed=0.5``; without a name from the default.
    A later value counts. Raises ValueError with a message for the operator.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    name = parts.pop(0) if parts and "=" not in parts[0] else "default"
    if name not in PROFILES:
        raise ValueError(f"there is no profile {name!r}; there are {', '.join(PROFILES)}")
    given = dict(part.partition("=")[::2] for part in parts)
    known = [field.name for field in fields(SimulatedProfile)]
    if unknown := given.keys() - set(known):
        raise ValueError(f"a simulated engine has no {min(unknown)!r}; it has {', '.join(known)}")
    try:
        return msgspec.convert(asdict(PROFILES[name]) | given, SimulatedProfile, strict=False)
    except msgspec.ValidationError as error:
        wrong, _, where = str(error).partition(" - at `$.")
        raise ValueError(f"{where.rstrip('`')}: {wrong}") from error


def tokens_max(groups: Kind, kv_blocks: int, block_size: int) -> int:
    """Tokens of the longest sequence for which there is room, beside what the other groups keep of it."""
    others = other_groups(groups, block_size)
    return (kv_blocks - (others.blocks_max + others.states if others is not None else 0)) * block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings(SimulatedProfile):
    """Settings of one simulated engine. Raises ValueError for values that cannot work."""

    transfer: Transfer = "memory"
    worker_id: str = "simulated"
    host: str = "127.0.0.1"
    """Address on which the TCP transfer agent listens."""
    kv_backend: str = USUAL_BACKEND
    """NIXL's plug-in, where NIXL moves KV."""
    epoch: int = 0
    """Identifies this engine to KV peers, with the worker's id."""
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

    @property
    def other_groups(self) -> OtherGroups | None:
        """None: the model has full attention alone."""
        return other_groups(self.groups, self.block_size)

    def __post_init__(self) -> None:
        for name in ("block_size", "kv_blocks", "max_model_len", "max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_model_len > tokens_max(self.groups, self.kv_blocks, self.block_size):
            raise ValueError(
                f"max_model_len {self.max_model_len} does not fit into {self.kv_blocks} KV blocks of {self.block_size}"
                f" tokens with groups={self.groups}: lower it or raise the KV cache"
            )


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
