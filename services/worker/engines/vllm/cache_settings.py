"""Options of vLLM's KV cache that Baton chooses for models with windows or a state.

What the operator typed stays. None of it changes what a block contains, but the unit of hashes must be equal in engines
that exchange KV, so it is part of the fingerprint.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection
from typing import Any

from connector.layout.engine_layout import STATE_GROUPS
from shared.contracts.workers import Role

UNIT_MAX = 128
"""Tokens of the largest unit chosen. A reader computes less than a unit of a prompt, and each unit has a hash."""
UNIT_STEP = 16
RETAINED_BLOCKS = 8
"""Blocks between the states that an engine keeps of an answer. Each takes a block of every group with a state."""
CHUNK, DTYPE = "--max-num-batched-tokens", "--dtype"
UNIT, RETENTION = "--prefix-match-unit", "--prefix-cache-retention-interval"


def typed_options(engine_args: str) -> set[str]:
    """The options among the operator's arguments, as vLLM documents them."""
    parts = (part.partition("=")[0] for part in shlex.split(engine_args) if part.startswith("--"))
    return {part.replace("_", "-") for part in parts}


def required_dtype(config: Any, typed: Collection[str]) -> str:
    """The type that the model's kernels need; empty: any."""
    needs_bf16 = is_on_cpu(config) and hasattr(config.model_config.hf_text_config, "linear_num_value_heads")
    return "bfloat16" if needs_bf16 and DTYPE not in typed else ""


def choose_cache_options(config: Any, typed: Collection[str], role: Role) -> list[str]:
    """Sets them in vLLM's configuration; returns what was chosen and why, for the log and `baton doctor`."""
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        return []
    chosen = []
    cache, text = config.cache_config, config.model_config.hf_text_config
    if config.model_config.is_hybrid:
        block = int(cache.block_size)
        if is_on_cpu(config) and CHUNK not in typed and any(hasattr(text, name) for name in STATE_GROUPS):
            scheduler = config.scheduler_config
            scheduler.max_num_batched_tokens = block
            scheduler.max_num_seqs = min(scheduler.max_num_seqs, block)
            chosen.append(f"{CHUNK} {block}, since a CPU keeps a Mamba 2 state only at the end of a step")
        unit = unit_of(block)
        if unit < block and UNIT not in typed:
            cache.prefix_match_unit = unit
            chosen.append(f"{UNIT} {unit}, so that prefixes meet within blocks of {block} tokens")
        if role is not Role.PREFILL and RETENTION not in typed:
            cache.prefix_cache_retention_interval = RETAINED_BLOCKS * block
            chosen.append(f"{RETENTION} {RETAINED_BLOCKS * block}, so that a next turn finds a state within an answer")
    elif has_windows(text) and role is not Role.PREFILL and RETENTION not in typed:
        cache.prefix_cache_retention_interval = None
        chosen.append(f"{RETENTION} none, so that a next turn finds the windows within an answer")
    return chosen


def unit_of(block: int) -> int:
    """The largest divisor of a block that is a multiple of ``UNIT_STEP`` up to ``UNIT_MAX``, or else the block."""
    return next((unit for unit in range(UNIT_MAX, 0, -UNIT_STEP) if block % unit == 0), block)


def has_windows(text_config: Any) -> bool:
    return bool(getattr(text_config, "sliding_window", None))


def is_on_cpu(config: Any) -> bool:
    return bool(config.device_config.device_type == "cpu")
