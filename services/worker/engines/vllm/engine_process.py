"""Runs in vLLM's EngineCore process: Baton's connector as vLLM loads it, the CPU executor, what the front end asks, and
a watch that ends the process with its parent.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from functools import cache
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.engine.coordinator import DPCoordinatorProc
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import get_kv_cache_spec_sliding_window, is_full_attention_spec

from connector import connector
from connector.layout.engine_layout import beyond_boundaries, dropped_from_hits
from connector.transfer.threads import unbind_heirs
from services.worker.engines.vllm.arguments import PARENT_PID


@cache
def end_with_parent() -> None:
    """Kill this process when the worker that started it has ended in any way. For the worker's children only.

    Otherwise EngineCore keeps running, with its memory, after its parent was killed. A parent-death signal does not
    work: it fires when the parent's *thread* ends, and engines are started from a thread.
    """
    parent = int(os.environ.get(PARENT_PID, "0"))
    if parent in (0, os.getpid()):
        return
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        parent_fd = os.pidfd_open(parent)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def watch() -> None:
        poller = select.poll()
        poller.register(parent_fd, select.POLLIN)
        poller.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def hash_block_size(core: Any) -> int:
    """Utility method added to ``EngineCore``: tokens of each block hash. The front end's configuration has the size of
    blocks only, which another number of tokens may fill.
    """
    size: int = core.scheduler.hash_block_size
    return size


def cache_groups(core: Any) -> tuple[int, list[tuple[int, bool, int]], tuple[int, int], int]:
    """Utility method added to ``EngineCore``: at multiples of how many tokens a prefix can be of use, for each KV cache
    group its block size, whether it is full attention, and its window in tokens (0: none), and what
    ``beyond_boundaries`` and ``dropped_from_hits`` say.
    """
    config = core.scheduler.kv_cache_config
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    return (
        config.cache_hit_alignment_tokens or 0,
        [
            (spec.block_size, is_full_attention_spec(spec), get_kv_cache_spec_sliding_window(spec) or 0)
            for spec in specs
        ],
        beyond_boundaries(core.vllm_config, config),
        dropped_from_hits(core.vllm_config, config),
    )


def prepare_engine_core() -> None:
    """Call where a connector's scheduler role begins: in EngineCore, on every device."""
    end_with_parent()
    EngineCore.hash_block_size = hash_block_size
    EngineCore.cache_groups = cache_groups


_run_coordinator = DPCoordinatorProc.run_coordinator


def run_coordinator(*args: Any, **options: Any) -> None:
    """In the process that rank 0 of a data parallel group starts besides EngineCore."""
    end_with_parent()
    _run_coordinator(*args, **options)


def end_coordinator_with_parent() -> None:
    """Call before the engine of a data parallel group is started: otherwise the coordinator outlives a worker that is
    killed.
    """
    DPCoordinatorProc.run_coordinator = staticmethod(run_coordinator)


class CpuExecutor(UniProcExecutor):
    """Runs the model inside EngineCore on a CPU: one process, one torch import and one queue fewer than vLLM's own.

    vLLM turns the name ``uni`` into ``mp`` on CPUs because it could not set OpenMP up otherwise. A subclass by its
    import path is not changed, and ``arguments.engine_threads`` sets OpenMP up before the child starts.
    """

    def _init_executor(self) -> None:
        end_with_parent()
        self._cores = os.sched_getaffinity(0)
        self._has_begun = False
        super()._init_executor()

    def execute_model(self, *args: Any, **options: Any) -> Any:
        """OpenMP has bound this thread to a core. EngineCore's threads for messages were started from it: on its core,
        an answer would wait for a pause of the next step, a millisecond or more.
        """
        if not self._has_begun:
            self._has_begun = True
            unbind_heirs(self._cores)
        return super().execute_model(*args, **options)

    def profile(self, is_start: bool = True, profile_prefix: str | None = None, **bounds: Any) -> None:
        """VLLM's table of all operators, which it prints on CPUs, takes ten times as long as the trace."""
        super().profile(is_start, profile_prefix, **bounds)
        if is_start:
            self.driver_worker.worker.profiler.dump_cpu_time_total = False


class BatonConnector(connector.BatonConnector):
    """The scheduler role runs in EngineCore, on every device: that process ends with its worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if role is KVConnectorRole.SCHEDULER:
            prepare_engine_core()
        super().__init__(vllm_config, role, kv_cache_config)
