"""Environment variables that vLLM reads at import and when it starts its child. Import this before vllm."""

from __future__ import annotations

import logging
import os
import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

PARENT_PID = "_BATON_ENGINE_PARENT_PID"
"""Process id of the worker, for its EngineCore. Not a setting, hence the underscore."""

SIDE_CHANNEL_PORTS = range(20_000, 32_000)
PORT_ATTEMPTS_MAX = 32


def prepare_import(*, kv_host: str, model_is_local: bool) -> None:
    """Set defaults for what vLLM reads at import. The operator's values stay."""
    os.environ[PARENT_PID] = str(os.getpid())
    defaults = _defaults(kv_host)
    if model_is_local:
        defaults["HF_HUB_OFFLINE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _defaults(kv_host: str) -> dict[str, str]:
    return {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # Full block hashes in KV events: their first 8 bytes go on the wire, and routers compute those too.
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
        # A host that the operator allows could send the engine anywhere.
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": kv_host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port(kv_host)),
        # Must be set before nixl is imported, or UCX sometimes leaks memory.
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_SERVICE_NAME": "baton-engine",
        "OTEL_BSP_SCHEDULE_DELAY": "1000",
        # Otherwise an unreachable receiver delays the end of the process by ten seconds.
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "2",
        # The front end multiplies no matrices; its OpenMP must not take cores from the engine.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # A part of vLLM's server sets the root logger's level, also Baton's, to this: keep the present one.
        "SAGEMAKER_CONTAINER_LOG_LEVEL": logging.getLevelName(logging.getLogger().level),
        # Allocates tensors in large pages: another process reads KV from them twice as fast.
        "THP_MEM_ALLOC_ENABLE": "1",
    }


def free_port(host: str) -> int:
    """A TCP port that is free now and probably still when vLLM binds it, many seconds later: the system never picks
    ports of this range by itself. Raises OSError when ``host`` is no address of this machine.
    """
    refused: OSError | None = None
    for port in random.sample(SIDE_CHANNEL_PORTS, PORT_ATTEMPTS_MAX):
        with socket.socket() as sock:
            try:
                sock.bind((host, port))
            except OSError as error:
                refused = error
            else:
                return port
    raise OSError(f"no port can be bound on {host}: set WORKER_KV_HOST to an address of this machine") from refused


def parse_cores(text: str) -> list[int]:
    """``0,2-3`` as [0, 2, 3]; empty text is every core this process may use. Raises ValueError."""
    if not text.strip():
        return sorted(os.sched_getaffinity(0))
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return sorted(cores)


def cores_of_ranks(cores: list[int], ranks: int) -> str:
    """Equal parts of the cores, in vLLM's notation: ``0,1|2,3``. Cores that are left over stay idle, as ranks work in
    lockstep. Raises ValueError when there are fewer cores than ranks.
    """
    each = len(cores) // ranks
    if not each:
        raise ValueError(
            f"WORKER_TENSOR_PARALLEL_SIZE is {ranks}, but the engine has {len(cores)} CPU cores, and each rank needs "
            "one: name more in WORKER_CPU_CORES or start fewer ranks"
        )
    parts = [cores[rank * each : (rank + 1) * each] for rank in range(ranks)]
    return "|".join(",".join(str(core) for core in part) for part in parts)


def bindings_of(cores: list[int], ranks: int) -> dict[str, str]:
    """Environment variables that bind an engine's OpenMP threads. Raises ValueError as ``cores_of_ranks`` does."""
    if ranks > 1:  # vLLM binds the threads of each rank's process.
        return {"VLLM_CPU_OMP_THREADS_BIND": cores_of_ranks(cores, ranks)}
    return {
        "OMP_NUM_THREADS": str(len(cores)),
        "OMP_PLACES": ",".join(f"{{{core}}}" for core in cores),
        "OMP_PROC_BIND": "close",
    }


@contextmanager
def engine_threads(bindings: Mapping[str, str]) -> Iterator[None]:
    """Set while the CPU engine's process starts: OpenMP threads are bound to their cores, and idle ones sleep.

    Bound threads make a token 4 to 30 times faster on a shared machine, and sleeping ones make an idle engine free.
    """
    wanted = {
        **bindings,
        "OMP_WAIT_POLICY": "passive",
        "KMP_BLOCKTIME": "0",
        # On the first request for logprobs vLLM compiles a helper, which blocks every request for five seconds.
        "TORCHDYNAMO_DISABLE": "1",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
