"""``python tiny_gguf.py MODEL_DIR FILE``: baton-tiny as a file for llama.cpp. Needs only the packages numpy and gguf."""

import json
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
CONTEXT_TOKENS = 4096


def main(model_dir: Path, file: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    writer = GGUFWriter(file, "llama")
    writer.add_name("baton-tiny")
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    add_tokenizer(writer, model_dir)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, weights in tensors(model_dir / "model.safetensors"):
        ours = gguf_name(name)
        part = ours.split(".")[2] if ours.startswith("blk.") else ours
        writer.add_tensor(f"{ours}.weight", permuted(weights, heads[part]) if part in heads else weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: GGUFWriter, model_dir: Path) -> None:
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text())
    settings = json.loads((model_dir / "tokenizer_config.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(vocabulary[settings["bos_token"]])
    writer.add_eos_token_id(vocabulary[settings["eos_token"]])
    writer.add_add_bos_token(True)
    writer.add_chat_template(settings["chat_template"])


def tensors(file: Path):
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + size]), memoryview(raw)[8 + size :]
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            yield name, np.frombuffer(data[begin:end], np.float32).reshape(tensor["shape"])


def gguf_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if not name.startswith("model.layers."):
        return NAMES[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}"


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """Llama.cpp rotates neighbouring values of a head, Hugging Face's Llama the two halves."""
    rows, columns = weights.shape
    return weights.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
