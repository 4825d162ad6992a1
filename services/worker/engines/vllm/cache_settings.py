"""Options of vLLM's KV cache that Baton chooses for models with windows or a state.

What the operator typed stays. None of it changes what a block contains, but the unit of hashes must be equal in engines
that exchange KV, so it is part of the fingerprint.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Collection
from typing import Any

from connector.layout.engine_layout import STATE_GROUPS
from shared.contracts.workers import Role

UNIT_MAX = 128
"""Tokens of the largest unit chosen. A reader computes less than a unit of a prompt, and each unit has a hash."""
UNIT_STEP = 16
ALL_TOKENS = "--disable-hybrid-kv-cache-manager"
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


def retains_answers(typed: Collection[str], role: Role) -> bool:
    """Whether the engine keeps windows and states within answers, so that the next turn finds them; vLLM keeps those at
    the end of a prompt.
    """
    return role is not Role.PREFILL and RETENTION not in typed


def choose_cache_options(config: Any, typed: Collection[str], role: Role) -> list[str]:
    """Sets them in vLLM's configuration; returns what was chosen and why, for the log and `baton doctor`."""
    model, scheduler = config.model_config, config.scheduler_config
    if model.attention_chunk_size is not None and scheduler.disable_hybrid_kv_cache_manager is False:
        scheduler.disable_hybrid_kv_cache_manager = True
        return [f"{ALL_TOKENS}, since a chunk of attention is exchanged with all KV before it"]
    if not config.cache_config.enable_prefix_caching and has_windows(model):
        scheduler.disable_hybrid_kv_cache_manager = True
        return [f"{ALL_TOKENS}, since a window is exchanged with all KV before it if prefix caching is off"]
    chosen = []
    if model.is_hybrid and is_on_cpu(config) and is_mamba2(model):
        if CHUNK not in typed:
            block = cpu_block(config)
            scheduler.max_num_batched_tokens = block
            scheduler.max_num_seqs = min(scheduler.max_num_seqs, block)
            chosen.append(f"{CHUNK} {block}, since a CPU keeps a Mamba 2 state only at the end of a step")
    elif model.is_hybrid and UNIT not in typed:
        unit = unit_of(int(config.cache_config.block_size))
        config.cache_config.prefix_match_unit = unit
        chosen.append(f"{UNIT} {unit}, so that prefixes meet within the long blocks of a model with a state")
    if retains_answers(typed, role) and (model.is_hybrid or has_windows(model)):
        what = "states" if model.is_hybrid else "windows"
        chosen.append(f"{RETENTION}, so that the next turn finds {what} within an answer")
    return chosen


def unit_of(block: int) -> int:
    """The largest divisor of a block that is a multiple of ``UNIT_STEP`` up to ``UNIT_MAX``, or else the block.

    The longer block that vLLM chooses when it knows the size of a state is a multiple of the block.
    """
    return next((unit for unit in range(UNIT_MAX, 0, -UNIT_STEP) if block % unit == 0), block)


def cpu_block(config: Any) -> int:
    """Tokens of the blocks that vLLM will choose on a CPU, so that one holds a state."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    tried = copy.deepcopy(config)
    current_platform._align_hybrid_block_size(tried, CPUAttentionBackend)
    return int(tried.cache_config.block_size)


def is_mamba2(model: Any) -> bool:
    return any(hasattr(model.hf_text_config, name) for name in STATE_GROUPS)


def has_windows(model: Any) -> bool:
    return bool(getattr(model.hf_text_config, "sliding_window", None))


def is_on_cpu(config: Any) -> bool:
    return bool(config.device_config.device_type == "cpu")
