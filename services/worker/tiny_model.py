"""Makes the model "baton-tiny": a small Llama with random weights, and its tokenizer.

Its completions have no meaning, but under greedy decoding they depend on every token of the prompt, as tests of KV
transfer require. The recipe is deterministic: all machines make the same bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TINY_MODEL = "baton-tiny"
VOCABULARY_MAX = 4096
CONTEXT_TOKENS = 131_072
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 256, 2, 4, 2, 64, 512
SEED = 20_240_517

BOS, EOS, SYSTEM, USER, ASSISTANT, TOOL = SPECIAL_TOKENS = (
    "<|bos|>",
    "<|eos|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
)
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3, Qwen and many others split text; baton-tiny itself splits as GPT-2 does."""
BOS_ID, EOS_ID = 0, 1
"""The trainer numbers the special tokens first, in their order."""
CORPUS = Path(__file__).with_name("tiny_corpus.txt")
CHAT_TEMPLATE = Path(__file__).with_name("tiny_chat_template.jinja")

# Attention must be selective enough that its output does not vanish as the mean of thousands of values, and wide
# enough that every block counts; its output must outweigh the last token, or greedy decoding falls into short loops.
# More selective than this, and the rounding that depends on how a prompt is cut into steps may change tokens.
QUERY_KEY_GAIN = 1.5
ATTENTION_GAIN = 2.0
# The end token's logit has a deviation larger by this factor, so that a completion ends after some hundreds of tokens.
EOS_LOGIT_GAIN = 1.3
ANSWER_TOKENS = 1024
"""Length limit of the response to a request without one."""


def ensure_tiny_tokenizer(cache_dir: Path, pattern: str = "") -> Path:
    """The directory with the tokenizer of baton-tiny, which is made if it is not cached. Takes about a second.
    ``pattern``: how to split text, such as ``CL100K``.
    """
    if not pattern:
        return _ensure(cache_dir, f"{TINY_MODEL}-tokenizer", _write_tokenizer)
    name = f"{TINY_MODEL}-tokenizer-{hashlib.sha256(pattern.encode()).hexdigest()[:8]}"
    return _ensure(cache_dir, name, partial(_write_tokenizer, pattern=pattern))


def ensure_tiny_model(cache_dir: Path) -> Path:
    """The directory with all of baton-tiny, which is made if it is not cached. Takes seconds; needs safetensors."""
    return _ensure(cache_dir, TINY_MODEL, _write_model)


def tiny_revision() -> str:
    """The digest of the recipe: code, corpus, template, and the libraries whose output it depends on."""
    recipe = hashlib.sha256()
    for path in (Path(__file__), CORPUS, CHAT_TEMPLATE):
        recipe.update(path.read_bytes())
    for library in ("numpy", "tokenizers"):
        recipe.update(f"{library}=={version(library)}".encode())
    return recipe.hexdigest()[:16]


def _ensure(cache_dir: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Make ``cache_dir/name-revision``, atomically, once even if several processes try."""
    target = cache_dir / f"{name}-{tiny_revision()}"
    if target.is_dir():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir / f"{name}.lock"):
        if target.is_dir():
            return target
        draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache_dir))
        try:
            write(draft)
            draft.chmod(0o755)
            draft.rename(target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write_model(directory: Path) -> None:
    from safetensors.numpy import save_file  # Not installed for services without an engine.

    _write_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab_size()
    _write_json(directory / "config.json", _config(vocabulary))
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "max_new_tokens": ANSWER_TOKENS},
    )
    save_file(_weights(vocabulary), directory / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(directory: Path, pattern: str = "") -> None:
    tokenizer = _train_tokenizer(pattern)
    tokenizer.save(str(directory / "tokenizer.json"))
    template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT, TOOL],
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    _write_json(directory / "tokenizer_config.json", settings)


def _train_tokenizer(pattern: str = "") -> Tokenizer:
    """Byte-level BPE, so that any text has tokens; a prompt begins with the bos token as for Llama models."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    if pattern:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_MAX,
        min_frequency=1,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([CORPUS.read_text(encoding="utf-8")], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def _config(vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }


def _weights(vocabulary: int) -> dict[str, NDArray[np.float32]]:
    """Gaussian matrices whose inputs have unit variance after the norms; the gains are explained above."""
    random = np.random.Generator(np.random.PCG64(SEED))

    def matrix(rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
        drawn = random.standard_normal((rows, columns), dtype=np.float32)
        scaled: NDArray[np.float32] = drawn * np.float32(gain / columns**0.5)
        return scaled

    ones = np.ones(HIDDEN, dtype=np.float32)
    weights = {"model.embed_tokens.weight": matrix(vocabulary, HIDDEN, HIDDEN**0.5)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        weights |= {
            f"{name}input_layernorm.weight": ones,
            f"{name}self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN, QUERY_KEY_GAIN),
            f"{name}self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, QUERY_KEY_GAIN),
            f"{name}self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, ATTENTION_GAIN),
            f"{name}post_attention_layernorm.weight": ones,
            f"{name}mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{name}mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{name}mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    head = matrix(vocabulary, HIDDEN)
    end = head[EOS_ID] * np.float32(EOS_LOGIT_GAIN)
    head[: len(SPECIAL_TOKENS)] = 0.0  # A logit of 0 is never the largest, so no completion contains a role marker.
    head[EOS_ID] = end
    return weights | {"model.norm.weight": ones, "lm_head.weight": head}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
