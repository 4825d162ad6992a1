"""A model whose KV is large for what it computes: 32 KB for each token, so that 2,048 tokens hand over 64 MB.

baton-tiny with more and wider heads, made in a second or two. Its weights are random, so its text is meaningless.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from services.worker.tiny_model import LAYERS, ensure_tiny_model

HEADS, HEAD_DIM = 16, 128
KV_BYTES_PER_TOKEN = LAYERS * 2 * HEADS * HEAD_DIM * 4
"""Layers, keys and values, heads, values of four bytes."""
NAME = "baton-wide"


def make_wide_model(folder: Path, cache_dir: Path) -> Path:
    """The model's directory."""
    tiny, wide = ensure_tiny_model(cache_dir), folder / NAME
    shutil.copytree(tiny, wide)
    config = json.loads((wide / "config.json").read_text())
    hidden = config["hidden_size"]
    config |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM}
    (wide / "config.json").write_text(json.dumps(config))
    draw = np.random.Generator(np.random.PCG64(1))
    weights = load_file(tiny / "model.safetensors")
    for name in weights:
        if "self_attn" in name:
            shape = (hidden, HEADS * HEAD_DIM) if "o_proj" in name else (HEADS * HEAD_DIM, hidden)
            weights[name] = draw.standard_normal(shape, dtype=np.float32) / np.float32(shape[1] ** 0.5)
    save_file(weights, wide / "model.safetensors", metadata={"format": "pt"})
    return wide
