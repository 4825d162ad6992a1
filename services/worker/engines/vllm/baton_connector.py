"""Baton's connector, as vLLM loads it."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from connector import connector
from services.worker.engines.vllm.child import end_with_parent


class BatonConnector(connector.BatonConnector):
    """The scheduler role runs in EngineCore, on every device: that process ends with its worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if role is KVConnectorRole.SCHEDULER:
            end_with_parent()
        super().__init__(vllm_config, role, kv_cache_config)
