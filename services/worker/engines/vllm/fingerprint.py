"""The fingerprint of an engine: what must be equal for two engines to exchange KV."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import vllm
from vllm.platforms import current_platform

from connector.layout.tensors import PROTOCOL_VERSION
from services.worker.engines.vllm.arguments import OWN_CONNECTOR
from shared.contracts.workers import Fingerprint

SAMPLE_BYTES = 64 * 1024
"""Of each weight file, the head, the middle and the tail have this size: enough to tell two models apart quickly."""


def fingerprint(config: Any) -> Fingerprint:
    """From vLLM's resolved configuration."""
    model, cache = config.model_config, config.cache_config
    return Fingerprint(
        model=model.served_model_name if isinstance(model.served_model_name, str) else model.served_model_name[0],
        revision=model_revision(model),
        dtype=str(model.dtype).removeprefix("torch."),
        block_size=cache.block_size,
        kv_layout=kv_layout(config),
        connector=connector(config),
        engine_version=f"vllm-{vllm.__version__}",
    )


def connector(config: Any) -> str:
    """The connector's name and protocol version."""
    if config.kv_transfer_config.kv_connector == OWN_CONNECTOR:
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
    """Of the whole configuration and index files, and of samples of the weights."""
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


def block_bytes(config: Any) -> int:
    """Bytes of KV in one block over all layers and ranks; 0 when the model's KV is not plain keys and values."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    if model.use_mla:
        return 0
    element = 1 if "fp8" in str(cache.cache_dtype) else model.dtype.itemsize
    per_token = 2 * model.get_num_kv_heads(parallel) * model.get_head_size() * element
    return int(per_token * model.get_num_layers(parallel) * cache.block_size * parallel.tensor_parallel_size)
