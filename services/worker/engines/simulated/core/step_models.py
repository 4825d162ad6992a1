"""How long a step of a simulated engine takes, by other models than the linear one of ``StepTiming``.

Both models are continuous and piecewise linear in the context of the decoding sequences, so a run of decode-only steps
has a closed form up to the next knot (``*_steps_alike``).

**Roofline**: the speeds of ``StepTiming`` in another sum. Every token of the step, of a prompt or decoded, needs the
compute of a prompt's token; weights and context are read once for all of them; the longer of both counts (Williams et
al., "Roofline", CACM 2009). So a small piece of a prompt is free beside a large decode batch, and decoding is beside a
large piece.

**Table**: interpolated from published measurements, none of them made by this project: kernels of vLLM 0.24.0 in bf16
on one H100 80 GB HBM3 (SXM), as collected by NVIDIA for aiconfigurator (aiconfigurator-core 0.12.0,
``systems/data/h100_sxm``, Apache-2.0). The model is Qwen3-8B's shape: 36 layers, hidden 4,096, 32 heads, 8 KV heads of
128, MLP 12,288, vocabulary 151,936. A step is the sum of

* matrix products of a layer by tokens in the step (QKV 6,144 x 4,096, output 4,096 x 4,096, gate and up 12,288 x 4,096
  each, down 4,096 x 12,288), and of the vocabulary by sampled tokens (65,536 x 4,096, scaled);
* FlashAttention 3 over prompts. It was measured without earlier context, so a chunk after a context takes the time of
  a prompt with as many pairs of tokens, and at least the time of reading that context once;
* FlashAttention 3 over decoding sequences, by their number and their mean context;
* what the measurements leave out, assumed: norms, activations and residuals move about 150 KB a token and layer at 80 %
  of 3.35 TB/s, and the host adds ``HOST_S`` to each step.

Beyond its ends a table continues with its last slope.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from services.worker.engines.simulated.core.settings import StepTiming

StepModelName = Literal["linear", "roofline", "table"]
FOREVER = 1 << 62
"""More steps than any run has."""


def roofline_s(timing: StepTiming, prefill_tokens: int, prefill_pairs: float, decoding: int, context: float) -> float:
    """Seconds of one step; see ``StepTiming.step_s``."""
    if not prefill_tokens and not decoding:
        return 0.0
    compute_s = timing.compute_s(prefill_tokens + decoding, prefill_pairs)
    read = context + (prefill_pairs / prefill_tokens if prefill_tokens else 0.0)
    memory_s = timing.decode_base_s + timing.decode_per_context_token_s * read
    overhead_s = timing.decode_per_sequence_s * decoding + (timing.prefill_base_s if prefill_tokens else 0.0)
    return overhead_s + max(compute_s, memory_s)


def roofline_steps_alike(timing: StepTiming, decoding: int, context: int) -> int:
    """How many decode-only steps, from one with this context, differ by equal times."""
    if not timing.decode_per_context_token_s:
        return FOREVER
    spare_s = timing.compute_s(decoding, 0.0) - timing.decode_base_s
    knot = spare_s / timing.decode_per_context_token_s
    return FOREVER if knot < context else int((knot - context) / decoding) + 1


LAYERS = 36
HOST_S = 0.0015
OTHER_KERNELS_US = 0.056
"""Time of the other kernels for a token and layer."""

TOKENS = (1, 16, 32, 64, 96, 128, 192, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
PRODUCTS_US = (
    143.4, 163.2, 157.1, 151.9, 153.0, 166.9, 173.6, 193.2, 250.6, 357.8, 480.7, 744.9, 986.7, 1507.7, 1953.6, 4137.8,
)  # fmt: skip
"""Matrix products of one layer, by ``TOKENS`` in the step."""
SAMPLED = (1, 16, 32, 64, 96, 128, 192, 256, 512)
VOCABULARY_US = (505.5, 504.7, 508.4, 527.8, 439.9, 450.3, 457.3, 545.1, 798.1)
PROMPTS = (1, 64, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240, 12288, 16384)
PROMPT_US = (11.6, 13.8, 17.7, 22.0, 35.5, 58.8, 89.0, 169.6, 264.3, 539.5, 912.2, 1367.8, 1957.7, 3310.4)
"""Attention of one layer over one prompt, by its tokens."""
PAIRS = tuple(tokens * tokens / 2 for tokens in PROMPTS)

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (2, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
DECODE_US = (
    (11.8, 11.7, 12.3, 13.2, 13.6, 15.4, 16.9, 19.8, 41.2, 67.7, 117.1),
    (11.8, 12.0, 13.2, 14.0, 15.1, 16.5, 19.3, 40.0, 65.3, 115.9, 218.9),
    (12.2, 12.6, 13.6, 15.0, 16.6, 18.5, 40.2, 64.4, 116.2, 211.5, 367.6),
    (12.6, 12.6, 14.3, 15.1, 18.2, 40.4, 58.3, 100.5, 210.3, 367.8, 693.3),
    (12.7, 13.0, 14.6, 17.6, 36.1, 57.2, 113.4, 210.9, 365.4, 692.0),
    (16.6, 17.3, 20.3, 42.0, 59.8, 100.8, 185.9, 354.3, 688.6),
    (24.3, 26.1, 46.1, 69.5, 119.4, 186.7, 353.6, 688.2),
    (38.0, 52.5, 73.3, 116.8, 190.5, 356.5, 689.8),
    (66.5, 87.9, 129.9, 221.2, 364.4),
)
"""Attention of one layer, by decoding sequences (``BATCHES``) and the tokens of each (the first of ``CONTEXTS``)."""


def table_s(prefill_tokens: int, prefill_pairs: float, decoding: int, context: float) -> float:
    """Seconds of one step; see ``StepTiming.step_s``."""
    tokens = prefill_tokens + decoding
    if not tokens:
        return 0.0
    layer_us = _at(TOKENS, PRODUCTS_US, tokens) + OTHER_KERNELS_US * tokens
    if prefill_tokens:
        reading_us = _decode_us(1, prefill_pairs / prefill_tokens)
        layer_us += max(_at(PAIRS, PROMPT_US, prefill_pairs), reading_us)
    if decoding:
        layer_us += _decode_us(decoding, context / decoding)
    vocabulary_us = _at(SAMPLED, VOCABULARY_US, decoding + (prefill_tokens > 0))
    return HOST_S + (LAYERS * layer_us + vocabulary_us) * 1e-6


def table_steps_alike(decoding: int, context: int) -> int:
    """How many decode-only steps, from one with this context, differ by equal times."""
    for knot in CONTEXTS[:-1]:
        if context < knot * decoding:
            return (knot * decoding - context) // decoding + 1
    return FOREVER


def _decode_us(sequences: int, context: float) -> float:
    index = min(max(bisect_right(BATCHES, sequences), 1), len(BATCHES) - 1)
    low, high = BATCHES[index - 1], BATCHES[index]
    fewer, more = (_at(CONTEXTS, row, context) for row in _rows()[index - 1 : index + 1])
    return fewer + (more - fewer) * (sequences - low) / (high - low)


@cache
def _rows() -> list[list[float]]:
    """``DECODE_US`` for all contexts."""
    return [[_at(CONTEXTS[: len(row)], row, context) for context in CONTEXTS] for row in DECODE_US]


def _at(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    index = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    low, high = xs[index - 1], xs[index]
    return ys[index - 1] + (ys[index] - ys[index - 1]) * (x - low) / (high - low)


NOISE_STEPS = 16
"""Steps in a row that share their noise: what slows a step down (clocks, the host) outlasts it, and a run of decode
steps keeps a closed form.
"""
NOISE_BEYOND = 3.0
"""Standard deviations at which the noise is cut."""
_MASK = (1 << 64) - 1
_BITS = 52
"""Bits of a uniform number that is below 1 as a float."""


def noise_factor(sigma: float, seed: int, step: int) -> float:
    """Log-normal with mean 1 and ``sigma`` of its logarithm; the same for the same seed and group of steps."""
    mixed = ((seed * 0x9E3779B97F4A7C15) ^ ((step // NOISE_STEPS + 1) * 0xD1B54A32D192ED03)) & _MASK
    for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):  # The finaliser of splitmix64.
        mixed = ((mixed ^ (mixed >> 30)) * multiplier) & _MASK
    mixed ^= mixed >> 31
    normal = NormalDist().inv_cdf(((mixed >> (64 - _BITS)) + 0.5) / (1 << _BITS))
    normal = min(max(normal, -NOISE_BEYOND), NOISE_BEYOND)
    return math.exp(sigma * normal - sigma * sigma / 2)
