"""vLLM's own NIXL connector with fixes for two faults that make it unusable on a shared CPU, and Baton's UCX settings.

* The progress thread of a NIXL agent spins: with no delay set it keeps one core busy for ever. With a delay it sleeps
  on UCX's file descriptors and still wakes at once when something arrives.
* On a CPU the connector moves the *calling* thread, which later runs the model, to the last core of each NUMA node.
  Two engines on a machine then compute on the same core.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.platforms import current_platform

from connector.transfer.agent import set_ucx_defaults
from services.worker.engines.vllm.engine_process import prepare_engine_core

PROGRESS_DELAY_US = 10_000
"""Longest sleep. Measured between two engines on one machine: handoffs as fast as with 2,000, and two thirds of its
idle CPU.
"""


def _let_progress_threads_sleep() -> None:
    from nixl import _bindings as nixl_bindings  # Imported only here, after vLLM has set UCX up.

    make_agent = nixl_bindings.nixlAgent
    if getattr(make_agent, "sleeps", False):
        return

    def make_sleeping_agent(name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_DELAY_US
        return make_agent(name, config)

    make_sleeping_agent.sleeps = True  # type: ignore[attr-defined]
    nixl_bindings.nixlAgent = make_sleeping_agent


class NixlConnector(NixlPullConnector):
    """See the module. The name is upstream's, because vLLM asks for it by name in a few places."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if role is KVConnectorRole.SCHEDULER:
            prepare_engine_core()
        set_ucx_defaults({current_platform.device_type})
        _let_progress_threads_sleep()
        cores = os.sched_getaffinity(0)
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            os.sched_setaffinity(0, cores)
