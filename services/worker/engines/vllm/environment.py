"""The environment that vLLM reads when it is imported and when it starts its child. Import this before any vllm."""

from __future__ import annotations

import logging
import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

PARENT_PID = "_BATON_ENGINE_PARENT_PID"
"""Tells the child whose it is; no setting, so no setting's prefix."""


SIDE_CHANNEL_PORTS = range(20_000, 32_000)
PORT_ATTEMPTS_MAX = 32


def prepare_import(*, kv_host: str, model_is_local: bool) -> None:
    """Set what vLLM reads at import. What the operator has set stays."""
    os.environ[PARENT_PID] = str(os.getpid())
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # Full block hashes in KV events: the first 8 bytes are the wire's, and routers compute those too.
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": kv_host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port(kv_host)),
        # Must stand before nixl is imported, or UCX leaks memory now and then.
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_SERVICE_NAME": "baton-engine",
        "OTEL_BSP_SCHEDULE_DELAY": "1000",
        # Or a receiver that is away would hold the process up for ten seconds when it ends.
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "2",
        # The front end multiplies no matrices; its OpenMP must not take cores from the engine.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # A part of vLLM's server sets the level of all loggers that inherit theirs, ours too: to what it is already.
        "SAGEMAKER_CONTAINER_LOG_LEVEL": logging.getLevelName(logging.getLogger().level),
        # Tensors in large pages: KV in them is read by another process twice as fast.
        "THP_MEM_ALLOC_ENABLE": "1",
    }
    if model_is_local:
        defaults["HF_HUB_OFFLINE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def free_port(host: str) -> int:
    """A TCP port that is free now and probably still when vLLM binds it, many seconds later: the system gives ports
    of this range to nobody who does not ask for them. Raises OSError when ``host`` is no address of this machine.
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


@contextmanager
def engine_threads(cores: list[int]) -> Iterator[None]:
    """While the CPU engine's process is started: bind its OpenMP threads to ``cores``, let idle ones sleep.

    Bound threads make a token 4 to 30 times faster on a shared machine, and sleeping ones make an idle engine free.
    """
    wanted = {
        "OMP_NUM_THREADS": str(len(cores)),
        "OMP_PLACES": ",".join(f"{{{core}}}" for core in cores),
        "OMP_PROC_BIND": "close",
        "OMP_WAIT_POLICY": "passive",
        "KMP_BLOCKTIME": "0",
        # vLLM compiles a helper when logprobs are first asked for: five seconds in which every request stands still.
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
