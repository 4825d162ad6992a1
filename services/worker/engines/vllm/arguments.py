"""vLLM's command line for a worker, from the worker's settings."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import msgspec

from connector.layout.engine_layout import UnsupportedEngine, config_refusals, refuse
from services.worker.engines.port import Identity
from services.worker.settings import Settings
from shared.contracts.workers import Fingerprint

CPU_KV_BYTES = 256 * 1024 * 1024
OWN_CONNECTOR = "BatonConnector"
OWN_SCHEDULERS = {
    False: "connector.scheduler.engine_scheduler.BatonScheduler",
    True: "connector.scheduler.engine_scheduler.BatonAsyncScheduler",
}
"""By whether vLLM schedules asynchronously; a scheduler of the wrong kind computes wrong tokens."""


NO_MEDIA_HOST = "none; send data: URLs, or ask the operator (BATON_MEDIA_DOMAINS)"
"""Stands for an empty list, which vLLM takes for every host. No host has this name: it contains a colon. vLLM's error
message to the client quotes it."""


def arguments(
    settings: Settings,
    model: str,
    *,
    on_cpu: bool,
    events: tuple[str, str],
    otlp_endpoint: str,
    media_hosts: frozenset[str] = frozenset(),
) -> list[str]:
    """The arguments of ``vllm serve``. The operator's own come last and override the others."""
    chosen = _chosen(settings, model, on_cpu=on_cpu, events=events, otlp_endpoint=otlp_endpoint)
    flags = ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--disable-fastapi-docs"]
    flags += ["--enable-logging-iteration-details"]  # Measured, not logged.
    flags += ["--enforce-eager"] if on_cpu else []
    flags += ["--enable-lora"] if settings.lora_dir or settings.lora_adapters else []
    typed = [part for name, value in chosen.items() if value for part in (name, value)]
    hosts = ["--allowed-media-domains", *(sorted(media_hosts) or [NO_MEDIA_HOST])]
    names = ["--served-model-name", *settings.model_names]
    return [*typed, *names, *hosts, *flags, *shlex.split(settings.engine_args)]


def _chosen(
    settings: Settings, model: str, *, on_cpu: bool, events: tuple[str, str], otlp_endpoint: str
) -> dict[str, str]:
    """Options with a value; those with an empty one are left out."""
    events_endpoint, replay_endpoint = events
    chosen = {
        "--model": model,
        "--block-size": str(settings.block_tokens if on_cpu else settings.block_size or ""),
        "--prefix-caching-hash-algo": "sha256_cbor",
        "--kv-transfer-config": json.dumps(_kv_transfer(settings, on_cpu=on_cpu)),
        "--kv-events-config": json.dumps(
            {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": events_endpoint,
                "replay_endpoint": replay_endpoint,
            }
        ),
        "--revision": settings.revision,
        "--max-model-len": str(settings.max_model_len or "auto"),
        "--kv-cache-memory-bytes": str(settings.kv_cache_bytes or (CPU_KV_BYTES if on_cpu else "")),
        "--otlp-traces-endpoint": f"{otlp_endpoint.rstrip('/')}/v1/traces" if otlp_endpoint else "",
    }
    ranks = settings.tensor_parallel_size
    if ranks > 1:
        chosen["--tensor-parallel-size"] = str(ranks)
    if on_cpu:
        own = "services.worker.engines.vllm.engine_process.CpuExecutor"
        chosen["--distributed-executor-backend"] = own if ranks == 1 else "mp"
        chosen["--dtype"] = "float32"
    return chosen


def _kv_transfer(settings: Settings, *, on_cpu: bool) -> dict[str, object]:
    common = {
        "kv_role": "kv_both",
        # A decode engine whose read fails computes the prompt itself instead of failing the request.
        "kv_load_failure_policy": "recompute",
    }
    if settings.connector == "baton":
        module = "services.worker.engines.vllm.engine_process"
        return {"kv_connector": OWN_CONNECTOR, "kv_connector_module_path": module, **common}
    extra: dict[str, object] = {"kv_lease_duration": round(settings.kv_lease_s)}
    if on_cpu:
        extra["num_threads"] = 0  # NIXL's own threads would take cores from the model.
    module = "services.worker.engines.vllm.upstream_connector"
    return {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": module,
        "kv_connector_extra_config": extra,
        **common,
    }


def refuse_unsupported(config: Any) -> None:
    """What vLLM's resolved configuration shows, before anything is loaded. Raises UnsupportedEngine."""
    if (ranks := config.parallel_config.data_parallel_size) != 1:
        why = "each of its ranks has its own KV cache, but one worker has one KV cache, one load and one address"
        raise UnsupportedEngine(f"data_parallel_size is {ranks}: {why}; set it to 1 and start {ranks} workers.")
    if config.lora_config is not None:
        _refuse_adapters(config)
    if config.kv_transfer_config.kv_connector == OWN_CONNECTOR:
        refuse(config_refusals(config))


def _refuse_adapters(config: Any) -> None:
    """Adapters that cannot be served. Raises UnsupportedEngine."""
    if config.lora_config.default_mm_loras:
        why = "routers cannot know which requests use them"
        raise UnsupportedEngine(f"default_mm_loras is set, but {why}; load adapters that requests name instead.")
    if config.device_config.device_type == "cpu" and config.model_config.is_moe:
        why = (
            f"{config.model_config.architecture} has experts, whose kernels for adapters need Triton, which needs a GPU"
        )
        raise UnsupportedEngine(f"enable_lora is set, but {why}; serve this model without adapters on a CPU.")


def configure_connector(
    config: Any,
    settings: Settings,
    identity: Identity,
    *,
    notifications: str,
    fingerprint: Fingerprint,
    refusal_file: Path,
) -> None:
    """Configure Baton's connector with what vLLM's resolved configuration shows. Leaves others alone."""
    if config.kv_transfer_config.kv_connector != OWN_CONNECTOR:
        return
    config.scheduler_config.scheduler_cls = OWN_SCHEDULERS[bool(config.scheduler_config.async_scheduling)]
    config.kv_transfer_config.kv_connector_extra_config.update(
        worker_id=identity.worker_id,
        epoch=identity.epoch,
        fingerprint=msgspec.structs.asdict(fingerprint),
        notifications=notifications,
        lease_s=settings.kv_lease_s,
        refusal_file=str(refusal_file),
        copy_cores=sorted(os.sched_getaffinity(0)),
    )
