"""Speeds and sizes of the replay's engines, where the numbers come from, and what an engine measures of itself."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from replay.traces import BLOCK_TOKENS
from services.worker.engines.simulated.core.groups import Kind, OtherGroups, other_groups
from services.worker.engines.simulated.core.settings import PROFILES as SIMULATED
from services.worker.engines.simulated.core.settings import StepTiming
from shared.contracts.load import StepTotals
from shared.engine_speed.steps import StepTotalsCounter

if TYPE_CHECKING:
    from replay.engine import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(StepTiming):
    """One kind of engine: its speeds and its size."""

    block_tokens: int = BLOCK_TOKENS
    kv_blocks: int = 800
    """KV blocks of all data parallel ranks together."""
    max_num_batched_tokens: int = 2048
    """Tokens of one batch, at most."""
    max_num_seqs: int = 256
    """Sequences of one data parallel rank, at most."""
    stages: int = 1
    """Pipeline stages. Each has a batch of its own in work, as in vLLM."""
    data_ranks: int = 1
    """Ranks of a data parallel group, which is one engine here: they step together, and requests are spread over them
    evenly.
    """
    kv_bytes_per_token: int = 131_072
    """Bytes of full attention. A block of a window or with a state is as large as one of full attention, as in vLLM."""
    groups: Kind = "full"
    """See ``SimulatedProfile.groups``."""
    host_blocks: int = 0
    """Blocks that host memory keeps beside the KV cache; 0: none."""
    host_bytes_per_s: float = 50e9
    """Bandwidth of loading host blocks: PCIe 5.0 with 16 lanes has 64 GB/s in each direction, of which copies reach
    some 80 %.
    """
    ask_s: float = 0.004
    """Seconds from requesting KV of another worker to its grant."""
    tail_tokens: int = 16
    """Tokens of a handed-over prompt that the decode worker computes. A real tail is shorter than a block of 16; the
    blocks of the trace have 512 tokens.
    """

    def __post_init__(self) -> None:
        if self.host_blocks and self.groups != "full":
            raise ValueError("host memory keeps blocks of models with full attention alone")
        if self.batches > 1 and self.step_model != "linear":
            raise ValueError("stages and data parallel ranks need linear step times")

    @property
    def batches(self) -> int:
        """Batches that one step computes beside each other."""
        return self.stages * self.data_ranks

    @property
    def step_tokens_max(self) -> int:
        """Tokens of one step, at most."""
        return self.batches * self.max_num_batched_tokens

    @property
    def prompt_tokens_max(self) -> int:
        """Tokens of one prompt in one step, at most: a prompt is computed by one rank."""
        return self.stages * self.max_num_batched_tokens

    @property
    def sequences_max(self) -> int:
        return self.data_ranks * self.max_num_seqs

    def step_s(
        self, prefill_tokens: int, prefill_pairs: float, decoding: int, context_tokens: float, *, follows: bool = False
    ) -> float:
        """Seconds of one step, in which each batch passes all stages once. ``follows``: it comes right after another
        with prompt tokens, whose last batches still are in the later stages.

        The ``decoding`` sequences are spread evenly over the batches. Prompts fill one batch after another, as vLLM's
        scheduler does. All ranks take as long as the one with most to do, since experts exchange tokens in each layer.
        Of a pipeline of ``p`` stages, ``m`` batches leave the last one after ``(m + p - 1) / p`` times what one takes:
        it has to be filled (Huang et al., GPipe, 2019, section 2.3, where ``(p - 1) / (m + p - 1)`` is the bubble).
        A sequence that decodes has its next token no sooner than its batch has passed all stages.
        """
        if self.batches == 1:
            return StepTiming.step_s(self, prefill_tokens, prefill_pairs, decoding, context_tokens)
        most = min(prefill_tokens, self.max_num_batched_tokens)
        together = -(-decoding // self.batches)
        longest_s = StepTiming.step_s(
            self,
            most,
            prefill_pairs * most / prefill_tokens if prefill_tokens else 0.0,
            together,
            context_tokens * together / decoding if decoding else 0.0,
        )
        if not prefill_tokens:
            return longest_s
        filled = min(self.stages, -(-prefill_tokens // self.max_num_batched_tokens))
        if not follows:
            return longest_s * (filled + self.stages - 1) / self.stages
        return longest_s if decoding else longest_s * filled / self.stages

    @property
    def other_groups(self) -> OtherGroups | None:
        """None: the model has full attention alone."""
        return other_groups(self.groups, self.block_tokens)

    @property
    def boundary_bytes(self) -> int:
        """Bytes of windows or states that come with a prompt of any length."""
        others = self.other_groups
        return 0 if others is None else others.blocks_max * self.block_tokens * self.kv_bytes_per_token

    def prompt_s(self, tokens: int, cached: int) -> float:
        """Seconds to compute a prompt alone in an engine, in chunks, when ``cached`` of its tokens are cached."""
        computed = max(1, tokens - cached)
        size = self.prompt_tokens_max
        if self.step_model == "linear" and self.stages == 1:
            steps = -(-computed // size)
            pairs = computed * (tokens - computed / 2)
            return (steps * self.prefill_base_s + self.compute_s(computed, pairs)) / self.speed
        ends = [*range(tokens - computed + size, tokens, size), tokens]
        starts = [tokens - computed, *ends[:-1]]
        return sum(
            self.step_s(end - start, (end - start) * (start + end) / 2, 0, 0, follows=start > tokens - computed)
            for start, end in zip(starts, ends, strict=True)
        )

    def transfer_s(self, tokens: int) -> float:
        """Seconds to read the KV of ``tokens`` over an idle link."""
        return self.transfer_base_s + self.occupies_s(tokens * self.kv_bytes_per_token + self.boundary_bytes)


def profile_like(name: str, kv_blocks: int) -> Profile:
    """An engine with the speeds of simulated engines of this name."""
    simulated = asdict(SIMULATED[name])
    del simulated["transfer"]
    return Profile(kv_blocks=kv_blocks, **simulated)


# 80 GB x 0.9 less weights and activations leave 52 GB for KV: 410,000 tokens = 800 blocks of 512.
PROFILES = {"8b": profile_like("8b", 800), "70b": profile_like("70b", 700), "80b-a3b": profile_like("80b-a3b", 4450)}

MEMORY = 0.9
"""Weight of the old value in a moving average."""
ITL_GROWTH = 1.01
"""Each bucket of times between tokens is wider than the one before by this factor."""


LOG_ITL_GROWTH = math.log(ITL_GROWTH)


class Speeds:
    """What an engine measures, like the worker's ``Measures``: moving averages, totals of all steps, and a
    histogram of the times between tokens.
    """

    def __init__(self) -> None:
        self.prompts = StepTotalsCounter()
        """Steps that compute prompts."""
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
            self.prompts.add(
                StepTotals(
                    seconds=took_s,
                    prefill_steps=1,
                    prefill_tokens=step.prefill_tokens,
                    prefill_pairs=step.prefill_pairs,
                    decode_steps=int(decoding > 0),
                    decode_requests=decoding,
                    decode_context_tokens=step.context_tokens if decoding else 0,
                )
            )
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
    """The bucket of a time between tokens."""
    return math.floor(math.log(max(seconds, 1e-9)) / LOG_ITL_GROWTH)


def seconds_of(bucket: int) -> float:
    """The middle of a bucket."""
    return math.pow(ITL_GROWTH, bucket + 0.5)
