"""Tiny random models that see pictures, for real engines, made with transformers' own classes. Their answers depend on the
picture.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tests.engines.front import model_with_images, model_with_marks

HEAD = 32
"""The smallest head that vLLM's CPU backend has."""
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


@dataclass(frozen=True)
class VisionFamily:
    make: Callable[[Path], Path]
    """Writes the model below a folder that does not exist yet."""
    encoder: str
    """The end of the name of weights through which all goes that its encoder says."""
    needs: str = ""
    """A package that its processor needs and the project does not. The CPU build of torch lacks operators that
    torchvision's package expects: ``torch.library.define`` must declare ``torchvision::nms`` and ``qnms`` before.
    """
    engine_args: str = ""
    pictures: int = 1
    """In one prompt."""


def blip(folder: Path) -> Path:
    """BLIP-2: its picture stands before all text."""
    folder.mkdir()
    path = model_with_images(folder)
    config = json.loads((path / "config.json").read_text())
    config["text_config"].update(
        hidden_size=4 * HEAD,
        word_embed_proj_dim=4 * HEAD,
        ffn_dim=256,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_hidden_layers=2,
    )
    (path / "config.json").write_text(json.dumps(config))
    return _with_weights(
        path, "Blip2ForConditionalGeneration", json.loads((path / "config.json").read_text()), 0.2, 1.0
    )


def qwen(folder: Path) -> Path:
    """Qwen2.5-VL: pictures stand anywhere, and positions have three dimensions."""
    folder.mkdir()
    path = model_with_marks(folder)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in QWEN_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings.update(image_token="<|image_pad|>", video_token="<|video_pad|>")
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 3136,
        "max_pixels": 12544,
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(images))
    (path / "config.json").unlink()
    return _with_weights(path, "Qwen2_5_VLForConditionalGeneration", _qwen_config(tokenizer), 0.1, 0.15)


def _qwen_config(tokenizer: Tokenizer) -> dict[str, Any]:
    start, end, image, video = map(tokenizer.token_to_id, QWEN_TOKENS)
    text = {
        "hidden_size": 4 * HEAD,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "max_position_embeddings": 4096,
        "vocab_size": tokenizer.get_vocab_size() // 64 * 64 + 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    }
    vision = {
        "hidden_size": 64,
        "depth": 2,
        "num_heads": 2,
        "intermediate_size": 128,
        "out_hidden_size": 4 * HEAD,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    return {
        "model_type": "qwen2_5_vl",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "tie_word_embeddings": False,
    }


def _with_weights(path: Path, model_class: str, config: dict[str, Any], spread: float, encoder_spread: float) -> Path:
    """Adds weights; what is there already stays."""
    import torch
    import transformers

    given = {file: file.read_bytes() for file in path.iterdir()}
    torch.manual_seed(0)
    kind = config.pop("model_type")
    model = getattr(transformers, model_class)(transformers.AutoConfig.for_model(kind, **config)).eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() > 1:
                sees = "visual" in name or "language_projection" in name
                weights.normal_(0.0, encoder_spread if sees else spread)
    model.save_pretrained(path)
    for file, content in given.items():
        file.write_bytes(content)
    return path


def blind(model: Path, encoder: str) -> None:
    """It sees nothing of a picture. A worker's fingerprint samples the weights, and not these."""
    file = model / "model.safetensors"
    with file.open("r+b") as weights:
        (size,) = struct.unpack("<Q", weights.read(8))
        (where,) = (about for name, about in json.loads(weights.read(size)).items() if name.endswith(encoder))
        begin, end = where["data_offsets"]
        weights.seek(8 + size + begin)
        weights.write(bytes(end - begin))


VISION_FAMILIES = {
    "blip-2": VisionFamily(blip, "language_projection.weight"),
    "qwen2.5-vl": VisionFamily(
        qwen,
        "visual.merger.mlp.2.weight",
        needs="torchvision",
        engine_args="--chat-template-content-format string --interleave-mm-strings "
        "--limit-mm-per-prompt.image 2 --limit-mm-per-prompt.video 0",
        pictures=2,
    ),
}
