"""The fingerprint of an engine: what must be equal for two engines to exchange KV."""

from __future__ import annotations

import hashlib
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import vllm
from vllm.platforms import current_platform

from connector.layout.tensors import PROTOCOL_VERSION
from services.worker.engines.vllm.arguments import OWN_CONNECTOR
from shared.contracts.workers import USUAL_BACKEND, Fingerprint, with_backend

SAMPLE_BYTES = 64 * 1024
"""Size of the samples at the head, the middle and the tail of each weight file: enough to tell two models apart
quickly."""


DIGEST_CHARS = 12
VOLATILE_KEYS = ("_name_or_path", "_commit_hash", "transformers_version")
"""Keys of a model's configuration that say where it came from, not what the model computes."""


def fingerprint(config: Any, backend: str = USUAL_BACKEND) -> Fingerprint:
    """From vLLM's resolved configuration, which has the operator's arguments applied. LoRA adapters do not belong here:
    the hashes of their blocks name their files. ``backend``: NIXL's plug-in.
    """
    model = config.model_config
    return Fingerprint(
        model=model.served_model_name if isinstance(model.served_model_name, str) else model.served_model_name[0],
        revision=model_revision(model),
        dtype=str(model.dtype).removeprefix("torch."),
        block_size=0,  # The engine chooses it, and the tokens of a block hash, while it starts.
        kv_layout=kv_layout(config),
        connector=with_backend(connector(config), backend),
        engine_version=f"vllm-{vllm.__version__}",
        options=options(config),
    )


DRAFTS_OF_TEXT = ("ngram", "ngram_gpu", "suffix")
"""Methods of ``--speculative-config`` without a model."""


def options(config: Any) -> str:
    """What changes KV or tokens and has no field of its own; what vLLM chooses by itself is left out."""
    model, cache, attention = config.model_config, config.cache_config, config.attention_config
    speculative = config.speculative_config
    given = {
        # With --hf-overrides applied: rope, YaRN, architecture, windows.
        "config": {key: value for key, value in model.hf_config.to_dict().items() if key not in VOLATILE_KEYS},
        "class_overrides": model.model_class_overrides,
        "code": model.code_revision,
        "impl": model.model_impl if model.model_impl != "auto" else None,
        "quantization": model.quantization,
        "quantization_config": model.quantization_config,
        "windows_off": model.disable_sliding_window or None,
        "generation": model.override_generation_config,
        "generation_from": generation_source(model),
        "logits_processors": model.logits_processors,
        "tokenizer": model.tokenizer if model.tokenizer != model.model else None,
        "tokenizer_revision": model.tokenizer_revision if model.tokenizer_revision != model.revision else None,
        "weights": f"{config.load_config.load_format}-{model.seed}" if is_random(config) else None,
        "media": getattr(model.multimodal_config, "mm_processor_kwargs", None),
        "kv_skips": cache.kv_cache_dtype_skip_layers,
        # Baton's connector reads between layouts: each handshake describes its own.
        "kv_layout": None if has_own_connector(config) else os.environ.get("VLLM_KV_CACHE_LAYOUT"),
        "mla_off": os.environ.get("VLLM_MLA_DISABLE"),
        "attention": attention.backend and attention.backend.name,
        "attention_kinds": {kind: backend.name for kind, backend in attention.backend_per_kind.items()},
        "hash": cache.prefix_caching_hash_algo,
        "hash_seed": os.environ.get("PYTHONHASHSEED"),
        **unit_options(config),
        "states": state_options(config),
        # With it layers with a window keep other blocks, so groups are others.
        "hybrid_manager_off": config.scheduler_config.disable_hybrid_kv_cache_manager or None,
        # A drafter that looks for earlier text has no KV.
        "draft": speculative
        and speculative.method not in DRAFTS_OF_TEXT
        and [speculative.method, speculative.model, speculative.revision],
        "lora": lora_options(config),
    }
    return " ".join(f"{name}={_short(value)}" for name, value in given.items() if value)


def generation_source(model: Any) -> Any:
    """Where sampling defaults and end tokens come from, unless from the model's own file. Of another file its values
    count, not its place.
    """
    if model.generation_config == "auto":
        return None
    return "vllm" if model.generation_config == "vllm" else [model.try_get_generation_config()]


def is_random(config: Any) -> bool:
    return str(config.load_config.load_format) == "dummy"


def lora_options(config: Any) -> dict[str, Any]:
    """What changes the KV of requests with an adapter, as far as it is not the default: an engine without LoRA has the
    same KV without an adapter.
    """
    lora = config.lora_config
    if lora is None:
        return {}
    given = {
        "dtype": str(lora.lora_dtype) if lora.lora_dtype != config.model_config.dtype else None,
        "modules": sorted(lora.target_modules or ()),
        "tower": lora.enable_tower_connector_lora,
        "mixed": lora.enable_mixed_moe_lora_format,
        "shared": lora.enable_moe_shared_loras,
    }
    return {name: value for name, value in given.items() if value}


def unit_options(config: Any) -> dict[str, Any]:
    """Where a model with states has boundaries: those of engines that differ here never meet."""
    if not config.model_config.is_hybrid:
        return {}
    cache = config.cache_config
    return {"unit": cache.prefix_match_unit, "block": cache.block_size}


def state_options(config: Any) -> dict[str, Any]:
    """What makes recurrent states different."""
    if not config.model_config.is_hybrid:
        return {}
    cache = config.cache_config
    return {
        "dtypes": [str(cache.mamba_cache_dtype), str(cache.mamba_ssm_cache_dtype)],
        "mode": cache.mamba_cache_mode,
        "convolution": os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT"),
    }


def _short(value: Any) -> str:
    """A word or a number as it is, everything else as a digest."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and value.replace("-", "").replace("_", "").isalnum():
        return value
    canonical = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:DIGEST_CHARS]


def has_own_connector(config: Any) -> bool:
    return bool(config.kv_transfer_config.kv_connector == OWN_CONNECTOR)


def connector(config: Any) -> str:
    """The connector's name and protocol version."""
    if has_own_connector(config):
        return f"baton-{PROTOCOL_VERSION}/nixl-{version('nixl')}"
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NIXL_CONNECTOR_VERSION

    return f"nixl-{NIXL_CONNECTOR_VERSION}/{version('nixl')}"


def kv_layout(config: Any) -> str:
    """The memory layout of a block: device, cache type, and on a CPU the instruction set that determines it."""
    model, cache = config.model_config, config.cache_config
    parts = [current_platform.device_type, str(cache.cache_dtype)]
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        parts.append(_get_attn_isa(model.dtype, cache.block_size, model.get_head_size()))
    return "-".join(parts)


def model_revision(model: Any) -> str:
    """The hub's commit, or a digest of the local files."""
    commit = getattr(model.hf_config, "_commit_hash", None)
    if commit:
        return str(commit)
    path = Path(model.model)
    return directory_digest(path) if path.is_dir() else str(model.revision or "")


def directory_digest(path: Path) -> str:
    """The digest of the whole configuration and index files, and of samples of the weights."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.suffix == ".json" or file.name.startswith("tokenizer"):
            digest.update(file.name.encode() + file.read_bytes())
        elif file.suffix in (".safetensors", ".bin", ".pt"):
            digest.update(file.name.encode() + _samples(file))
    return digest.hexdigest()[:16]


def _samples(file: Path) -> bytes:
    size = file.stat().st_size
    taken = [str(size).encode()]
    with file.open("rb") as stream:
        for start in (0, size // 2, max(0, size - SAMPLE_BYTES)):
            stream.seek(start)
            taken.append(stream.read(SAMPLE_BYTES))
    return b"".join(taken)


def token_bytes(config: Any) -> int:
    """Bytes of a token's KV over all layers and ranks; 0 when the model's KV is not plain keys and values."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    if model.use_mla:
        return 0
    element = 1 if "fp8" in str(cache.cache_dtype) else model.dtype.itemsize
    per_token = 2 * model.get_num_kv_heads(parallel) * model.get_head_size() * element
    return int(per_token * model.get_total_num_hidden_layers() * parallel.tensor_parallel_size)
