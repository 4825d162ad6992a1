"""LoRA adapters with random weights, for the attention of models in safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def make_adapter(model: Path, folder: Path, *, seed: int, rank: int = 8, gain: float = 0.3) -> Path:
    """An adapter of the model in ``model``, written to ``folder``; large enough that it changes greedy answers."""
    draw, tensors = np.random.default_rng(seed), {}
    for name, (outputs, inputs) in attention_shapes(model).items():
        for part, shape in {"lora_A": (rank, inputs), "lora_B": (outputs, rank)}.items():
            tensors[f"base_model.model.{name}.{part}.weight"] = (draw.standard_normal(shape) * gain).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(PROJECTIONS),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


def attention_shapes(model: Path) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each projection, by the module's name."""
    shapes = {}
    with safe_open(model / "model.safetensors", framework="np") as weights:
        for name in weights.keys():  # noqa: SIM118  # no mapping
            module = name.removesuffix(".weight")
            if name.endswith(".weight") and module.rpartition(".")[2] in PROJECTIONS:
                outputs, inputs = weights.get_slice(name).get_shape()
                shapes[module] = outputs, inputs
    return shapes
