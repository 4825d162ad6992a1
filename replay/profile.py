"""Speeds and sizes of the replay's engines, where the numbers come from, and what an engine measures of itself."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replay.traces import BLOCK_TOKENS
from services.worker.engines.simulated.core.settings import StepTiming
from shared.contracts.load import StepTotals

if TYPE_CHECKING:
    from replay.engine import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(StepTiming):
    """One kind of engine: its speeds and its size."""

    block_tokens: int = BLOCK_TOKENS
    kv_blocks: int = 800
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    prefill_tokens_per_s: float = 24_600.0
    prefill_base_s: float = 0.002
    prefill_s_per_pair: float = 1.3e-9
    decode_base_s: float = 0.008
    decode_per_sequence_s: float = 0.000_05
    decode_per_context_token_s: float = 6e-8
    transfer_bytes_per_s: float = 25e9
    transfer_base_s: float = 0.002
    kv_bytes_per_token: int = 131_072
    host_blocks: int = 0
    """Blocks that host memory keeps beside the KV cache; 0: none."""
    host_bytes_per_s: float = 50e9
    """Of loading them: PCIe 5.0 with 16 lanes has 64 GB/s in each direction, of which copies reach some 80 %."""
    ask_s: float = 0.004
    """From requesting KV of another worker to its grant."""
    tail_tokens: int = 16
    """Tokens of a handed-over prompt that the decode worker computes. A real tail is shorter than a block of 16; the
    blocks of the trace have 512 tokens.
    """

    def prompt_s(self, tokens: int, cached: int) -> float:
        """Seconds to compute a prompt alone in an engine, in chunks, when ``cached`` of its tokens are cached."""
        computed = max(1, tokens - cached)
        size = self.max_num_batched_tokens
        if self.step_model == "linear":
            steps = -(-computed // size)
            pairs = computed * (tokens - computed / 2)
            return (steps * self.prefill_base_s + self.compute_s(computed, pairs)) / self.speed
        ends = [*range(tokens - computed + size, tokens, size), tokens]
        starts = [tokens - computed, *ends[:-1]]
        return sum(
            self.step_s(end - start, (end - start) * (start + end) / 2, 0, 0)
            for start, end in zip(starts, ends, strict=True)
        )

    def transfer_s(self, tokens: int) -> float:
        """Seconds to read the KV of ``tokens`` over an idle link."""
        return self.transfer_base_s + self.occupies_s(tokens * self.kv_bytes_per_token)


PROFILES = {
    # An 8-billion-parameter model with grouped-query attention (32 layers, 8 KV heads of 128, hidden 4,096) in bf16 on
    # a GPU with 989 TFLOP/s, 3.35 TB/s and 80 GB, one per worker, and 200 Gbit/s of network each. From first principles
    # at 40 % of the peak in prefill and 60-80 % of the bandwidth in decode, as serving engines reach:
    #   prefill: 2 x 8e9 FLOP = 16 GFLOP per token / 396 TFLOP/s -> 24,600 tokens/s, and for attention 4 x 32 x 4,096
    #     FLOP per earlier token -> 1.3 ns, so a prompt of 12,000 tokens takes 0.6 s and one of 40,000 takes 2.7 s;
    #   decode: 16 GB of weights / 3.35 TB/s / 60 % -> 8 ms a step; 128 KiB of KV per token of context -> 60 ns;
    #   KV: 80 GB x 0.9 less weights and activations -> 52 GB -> 410,000 tokens = 800 blocks of 512.
    "8b": Profile(),
    # A 70-billion-parameter model (80 layers, 8 KV heads of 128, hidden 8,192) on four of the same GPUs.
    "70b": Profile(
        kv_blocks=700,
        prefill_tokens_per_s=10_000.0,
        prefill_s_per_pair=1.8e-9,
        decode_base_s=0.018,
        decode_per_sequence_s=0.000_1,
        decode_per_context_token_s=4e-8,
        transfer_bytes_per_s=100e9,
        kv_bytes_per_token=327_680,
    ),
}


MEMORY = 0.9
"""Weight of the old value in a moving average."""
PREFILL_SAMPLE_TOKENS_MIN = 32
ITL_GROWTH = 1.01
"""Each bucket of times between tokens is wider than the one before by this factor."""


LOG_ITL_GROWTH = math.log(ITL_GROWTH)


class Speeds:
    """What an engine measures, like the worker's ``Measures``: two moving averages, totals of all steps, and a
    histogram of the times between tokens.
    """

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        self.decode_s_per_token = 0.0
        self.busy_s = 0.0
        self.prefill_steps = 0
        self.prefill_tokens = 0
        self.prefill_pairs = 0.0
        self.decode_steps = 0
        self.decode_requests = 0
        self.decode_context_tokens = 0
        self.itl: Counter[int] = Counter()
        """Tokens by bucket of the time since the token before."""

    def stepped(self, step: Step) -> None:
        """Steps have ended."""
        count, decoding = step.count, step.decoding
        took_s = step.seconds(count)
        self.busy_s += took_s
        if step.prefill_tokens:
            self.prefill_steps += 1
            self.prefill_tokens += step.prefill_tokens
            self.prefill_pairs += step.prefill_pairs
            if step.prefill_tokens >= PREFILL_SAMPLE_TOKENS_MIN and took_s:
                self.prefill_tokens_per_s = blend(self.prefill_tokens_per_s, step.prefill_tokens / took_s, 1)
        if decoding:
            self.decode_steps += count
            self.decode_requests += count * decoding
            self.decode_context_tokens += count * step.context_tokens + decoding * count * (count - 1) // 2
            each_s = took_s / count
            self.decode_s_per_token = blend(self.decode_s_per_token, each_s, count)
            self.itl[bucket_of(each_s)] += decoding * count

    def totals(self) -> StepTotals:
        """For the load report."""
        return StepTotals(
            seconds=self.busy_s,
            prefill_steps=self.prefill_steps,
            prefill_tokens=self.prefill_tokens,
            prefill_pairs=self.prefill_pairs,
            decode_steps=self.decode_steps,
            decode_requests=self.decode_requests,
            decode_context_tokens=self.decode_context_tokens,
        )


def blend(old: float, sample: float, times: int) -> float:
    """The moving average after the same sample came so many times."""
    weight = MEMORY**times
    return weight * old + (1 - weight) * sample if old else sample


def bucket_of(seconds: float) -> int:
    """Of a time between tokens."""
    return math.floor(math.log(max(seconds, 1e-9)) / LOG_ITL_GROWTH)


def seconds_of(bucket: int) -> float:
    """The middle of a bucket."""
    return math.pow(ITL_GROWTH, bucket + 0.5)
