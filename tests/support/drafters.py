"""Tiny models with a drafter (speculative decoding): one that drafts for itself, one with an EAGLE head, and one with a layer
for it of its own (MTP).
"""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from services.worker.tiny_model import ensure_tiny_model
from tests.support.model_families import make_model

DRAFTED = 3
"""Tokens that are drafted for each step."""
AT_LEAST = 0.98
"""Acceptance after a handoff, as a share of that without one."""
ACCEPTED_MIN = {"draft": AT_LEAST, "eagle": 0.8, "mtp": 0.8}
"""Acceptance without a handoff, of drafters with KV."""
METHODS = (*ACCEPTED_MIN, "ngram")
EMBEDDINGS = "model.embed_tokens.weight"
STATES_COUNT = np.float32(0.3)
"""Of layers with a state, the share of what they would add."""


@dataclass(frozen=True)
class Drafting:
    """A model and how an engine drafts with it."""

    model: Path
    config: dict[str, Any]

    @property
    def engine_args(self) -> str:
        config = {"num_speculative_tokens": DRAFTED, **self.config}
        return f"--speculative-config {shlex.quote(json.dumps(config))}"

    @classmethod
    def by(cls, method: str, folder: Path) -> Drafting:
        """With a model that is made below ``folder``."""
        tiny = ensure_tiny_model(folder)
        if method == "eagle":
            model, head = _with_eagle_head(tiny, folder)
            return cls(model, {"method": "eagle", "model": str(head)})
        if method == "mtp":
            return cls(_with_mtp_layer(tiny, folder), {"method": "mtp"})
        if method == "ngram":
            return cls(tiny, {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1})
        if method == "state-mtp":
            return cls(_with_state_and_mtp_layer(folder), {"method": "mtp"})
        return cls(tiny, {"method": "draft_model", "model": str(tiny)})


def _with_eagle_head(tiny: Path, folder: Path) -> tuple[Path, Path]:
    """A model with one layer, and an EAGLE head that computes the same, but for a prompt's first token, which heads do not
    see. A head has no norms before and after its layer: embeddings of unit length need none before, and the likeliest
    token is the same without one after.
    """
    config, weights, layer = _one_layer(tiny)
    del layer["input_layernorm.weight"]
    head = {f"layers.0.{name}": array for name, array in layer.items()}
    size = config["hidden_size"]
    head["fc.weight"] = np.eye(size, 2 * size, dtype=np.float32)  # Of embedding and the model's output, the embedding.
    return _saved(tiny, folder / "one-layer", config, weights), _saved(tiny, folder / "eagle", config, head)


def _with_mtp_layer(tiny: Path, folder: Path) -> Path:
    """A MiMo (a Qwen 2 with an MTP layer) with one layer, and an MTP layer that computes the same, but for a prompt's first
    two tokens: it does not see the first one, and takes no account of the second one.
    """
    config, weights, layer = _one_layer(tiny)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        layer[f"self_attn.{name}_proj.bias"] = np.zeros(count * config["head_dim"], np.float32)
    size = config["hidden_size"]
    layers = {
        "layers": layer,
        "mtp_layers": {
            **layer,
            "input_proj.weight": np.eye(
                size, 2 * size, k=size, dtype=np.float32
            ),  # Of output and embedding, the latter.
            "final_layernorm.weight": weights["model.norm.weight"],
            **{f"{name}_layernorm.weight": np.ones(size, np.float32) for name in ("token", "hidden")},
        },
    }
    made = {f"model.{kind}.0.{name}": array for kind, arrays in layers.items() for name, array in arrays.items()}
    about = {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    return _saved(tiny, folder / "mimo", {**config, **about}, {**weights, **made})


def _with_state_and_mtp_layer(folder: Path) -> Path:
    """A Qwen 3 Next with an MTP layer that computes what the model's last layer does. The layers before it, those with a
    state, count less than they would, so that some drafts are accepted.
    """
    path = make_model("qwen3-next", folder)
    config, weights = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    weights[EMBEDDINGS] = _of_unit_length(weights[EMBEDDINGS])
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    for name, array in list(weights.items()):
        if name.startswith(last):
            weights[f"mtp.layers.0.{name.removeprefix(last)}"] = array
        elif name.endswith(("out_proj.weight", "down_proj.weight")):
            weights[name] = array * STATES_COUNT
    size = config["hidden_size"]
    weights["mtp.fc.weight"] = np.eye(size, 2 * size, dtype=np.float32)  # Of embedding and state, the embedding.
    weights["mtp.norm.weight"] = weights["model.norm.weight"]
    for name in ("hidden", "embedding"):
        weights[f"mtp.pre_fc_norm_{name}.weight"] = np.zeros(size, np.float32)
    return _saved(path, path.with_name("qwen3-next-mtp"), {**config, "num_nextn_predict_layers": 1}, weights)


def _one_layer(tiny: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Configuration and weights of the model's first layer alone, with embeddings of unit length; and the layer's own."""
    config = {**json.loads((tiny / "config.json").read_text()), "num_hidden_layers": 1}
    weights = {name: array for name, array in load_file(tiny / "model.safetensors").items() if "layers.1." not in name}
    weights[EMBEDDINGS] = _of_unit_length(weights[EMBEDDINGS])
    beginning = "model.layers.0."
    layer = {name.removeprefix(beginning): array for name, array in weights.items() if name.startswith(beginning)}
    return config, weights, layer


def _of_unit_length(embeddings: Any) -> Any:
    """That of the padding stays zero."""
    return embeddings / np.sqrt(np.mean(embeddings**2, axis=1, keepdims=True)).clip(np.finfo(np.float32).tiny)


def _saved(of: Path, path: Path, config: dict[str, Any], weights: dict[str, Any]) -> Path:
    """A copy of a model with other weights."""
    shutil.copytree(of, path)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
