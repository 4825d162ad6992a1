"""vLLM's command line for a worker, from the worker's settings."""

from __future__ import annotations

import json
import shlex

from services.worker.settings import Settings

CPU_KV_BYTES = 256 * 1024 * 1024
LEASE_S = 30
"""Seconds that a prefill engine keeps a prompt's blocks for a decode engine that does not come."""


def arguments(
    settings: Settings, model: str, *, on_cpu: bool, events: tuple[str, str], otlp_endpoint: str
) -> list[str]:
    """As one would type them after ``vllm serve``; the operator's own come last and win."""
    events_endpoint, replay_endpoint = events
    chosen = {
        "--model": model,
        "--block-size": str(settings.block_size),
        "--prefix-caching-hash-algo": "sha256_cbor",
        "--kv-transfer-config": json.dumps(_kv_transfer(on_cpu=on_cpu)),
        "--kv-events-config": json.dumps(
            {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": events_endpoint,
                "replay_endpoint": replay_endpoint,
            }
        ),
        "--served-model-name": settings.served_model_name or settings.model,
        "--revision": settings.revision,
        "--max-model-len": str(settings.max_model_len or "auto"),
        "--kv-cache-memory-bytes": str(settings.kv_cache_bytes or (CPU_KV_BYTES if on_cpu else "")),
        "--otlp-traces-endpoint": f"{otlp_endpoint.rstrip('/')}/v1/traces" if otlp_endpoint else "",
    }
    if on_cpu:
        chosen["--distributed-executor-backend"] = "services.worker.engines.vllm_child.CpuExecutor"
        chosen["--dtype"] = "float32"
    flags = ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--disable-fastapi-docs"]
    flags += ["--enforce-eager"] if on_cpu else []
    typed = [part for name, value in chosen.items() if value for part in (name, value)]
    return [*typed, *flags, *shlex.split(settings.engine_args)]


def _kv_transfer(*, on_cpu: bool) -> dict[str, object]:
    extra: dict[str, object] = {"kv_lease_duration": LEASE_S}
    if on_cpu:
        extra["num_threads"] = 0  # more threads of NIXL's would take cores from the model
    return {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "services.worker.engines.vllm_connector",
        "kv_role": "kv_both",
        # A decode engine whose read fails computes the prompt itself instead of failing the request.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
