"""Tiny random models of many families for real engines, made with transformers' own classes; they share baton-tiny's
tokenizer. The weights are drawn widely enough that answers depend on the prompt.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from services.worker.tiny_model import BOS_ID, EOS_ID, ensure_tiny_tokenizer

VOCABULARY_MAX = 4096
WINDOW = 64
"""Tokens of a window or chunk: two blocks."""
STATE_BLOCKS = 2
"""Of a group: the state that a request goes on from, and the one that it writes."""
COMMON = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": EOS_ID,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 2048,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""With plain rope, MLA computes wrong tokens on a CPU (vLLM 0.32)."""
LATENT = {
    "rope_parameters": YARN,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "q_lora_rank": 64,
    "head_dim": None,
    "num_key_value_heads": 4,
    "topk_method": "greedy",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}


@dataclass(frozen=True)
class Family:
    """One family of models."""

    config: str
    """Its configuration class in transformers."""
    differs: dict[str, Any] = field(default_factory=dict)
    """From ``COMMON``; None takes a key away."""
    block: int = 32
    """Tokens of a KV block in vLLM's CPU backend."""
    has_full: bool = True
    """Whether some layers have full attention: a group of KV cache blocks."""
    windows: int = 0
    """Groups of layers with a window."""
    window_block: int = 32
    """Tokens of a block of theirs."""
    states: int = 0
    """Groups of layers with a state."""

    @property
    def groups(self) -> int:
        """Groups of KV cache blocks."""
        return self.has_full + self.windows + self.states

    def blocks(self, tokens: int, step: int = 1) -> int:
        """Blocks of vLLM's pool, which serves all groups, that a request of so many tokens holds at most. ``step``: tokens
        that the engine may compute before it frees what a window has left.
        """
        full = ceil(tokens / self.block) if self.has_full else 0
        window = ceil((WINDOW - 1 + step) / self.window_block) + 1
        return full + self.windows * window + self.states * STATE_BLOCKS


FAMILIES = {
    "llama": Family("LlamaConfig"),
    "qwen3": Family("Qwen3Config"),
    "qwen3-moe": Family("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
    "mistral": Family("MistralConfig", {"sliding_window": None}),
    "mistral-window": Family("MistralConfig", {"sliding_window": WINDOW}, has_full=False, windows=1),
    "granite": Family("GraniteConfig"),
    "gemma-2": Family(
        "Gemma2Config", {"tie_word_embeddings": True, "sliding_window": WINDOW, "query_pre_attn_scalar": 32}, windows=1
    ),
    "gemma-3": Family(
        "Gemma3TextConfig", {"num_hidden_layers": 6, "sliding_window": WINDOW, "query_pre_attn_scalar": 32}, windows=5
    ),
    "gemma-4": Family(
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 6,
            "sliding_window": WINDOW,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
        windows=5,
        window_block=64,
    ),
    "gpt-oss": Family("GptOssConfig", EXPERTS | {"sliding_window": WINDOW}, windows=1),
    "llama-4": Family(
        "Llama4TextConfig",
        {
            "attention_chunk_size": WINDOW,
            "intermediate_size_mlp": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
        },
    ),
    "cohere-2": Family("Cohere2Config", {"sliding_window": WINDOW, "tie_word_embeddings": True}, windows=3),
    "deepseek-v2": Family("DeepseekV2Config", LATENT, block=16),
    "qwen3-next": Family(
        "Qwen3NextConfig",
        {
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 1,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "full_attention_interval": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "head_dim": 256,
            "num_key_value_heads": 4,
        },
        states=3,
    ),
    "granite-4": Family(
        "GraniteMoeHybridConfig",
        MAMBA_2 | EXPERTS | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 64},
        block=64,
        states=1,
    ),
    "falcon-h1": Family("FalconH1Config", MAMBA_2 | {"mamba_d_ssm": 256}, block=64, states=1),
    "nemotron-h": Family(
        "NemotronHConfig",
        {
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "chunk_size": 64,
        },
        block=64,
        states=2,
    ),
    "lfm2": Family(
        "Lfm2Config",
        {
            "tie_word_embeddings": True,
            "layer_types": ["conv", "full_attention"] * 2,
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 128,
            "block_dim": 128,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
        },
        states=1,
    ),
}


def make_model(name: str, folder: Path, **differs: Any) -> Path:
    """Write the family's model below ``folder``, with ``differs`` in its configuration; takes about a second and imports
    torch.
    """
    import torch
    import transformers

    family, path = FAMILIES[name], folder / name
    given = {**COMMON, "vocab_size": VOCABULARY_MAX, **family.differs, **differs}
    keys = {key: value for key, value in given.items() if value is not None or key == "sliding_window"}
    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**keys)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(path)
    tokenizer = ensure_tiny_tokenizer(folder / "tokenizer")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, path)
    return path
