"""Where the engines of these tests run: on one or two GPUs, or on the CPU to rehearse the tests themselves."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from services.launcher.system.machine import gpus
from tests.support.kv_driver import BLOCK, MODEL
from tests.support.worker_processes import WorkerProcess, start_worker

ON_CPU = bool(os.environ.get("ON_CPU"))
GPUS = () if ON_CPU else gpus()
KV_BYTES = 512 << 20
"""An eighth of it is more than a measurement of the speed reads."""
# Engines of different sizes, or with and without a cached prefix, round differently: with float32 no tiny random model
# is so undecided between two tokens that it matters. Only this backend computes with it, and two engines fit on a GPU.
ENGINE_ARGS = "--dtype float32 --attention-backend TRITON_ATTN --enforce-eager --gpu-memory-utilization 0.3"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Devices of one worker."""

    environ: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    python: str = sys.executable


def place(*ranks: int) -> Place:
    """A GPU for each rank, by number; numbers that the machine does not have begin again at its first."""
    size = {"tensor_parallel_size": str(len(ranks)), "max_model_len": "4096", "served_model_name": MODEL}
    if ON_CPU:
        return Place(settings={**size, "cpu_cores": ",".join(map(str, ranks))})
    chosen = dict.fromkeys(GPUS[rank % len(GPUS)] for rank in ranks)
    own = {"block_size": str(BLOCK), "kv_cache_bytes": str(KV_BYTES), "engine_args": ENGINE_ARGS}
    return Place(environ={"CUDA_VISIBLE_DEVICES": ",".join(chosen), "UCX_PROTO_INFO": "y"}, settings={**size, **own})


def layout_of(where: Place, layout: str, folder: Path) -> Place:
    """The same place for an engine whose KV cache has this layout. Empty: what it has by default where vLLM chooses the
    block size, all layers of a block together; a CPU engine has that by a plugin only.
    """
    settings = {name: value for name, value in where.settings.items() if name != "block_size"}
    environ = {"VLLM_KV_CACHE_LAYOUT": layout} if layout else {}
    if ON_CPU:
        from tests.support.cpu_layouts import plugin_in  # Imports vLLM.

        environ = {"VLLM_KV_CACHE_LAYOUT": layout or "BLHNC", "PYTHONPATH": plugin_in(folder)}
    return Place(environ={**where.environ, **environ}, settings=settings)


def start(nats_url: str, worker_id: str, folder: Path, role: str, where: Place, **environ: str) -> WorkerProcess:
    """Start a worker with a real engine there."""
    variables = {**where.environ, **environ}
    return start_worker(
        nats_url, worker_id, folder, environ=variables, python=where.python, role=role, **where.settings
    )
