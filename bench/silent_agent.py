"""An agent whose engine sends no notices: its grants take the bus alone."""

from __future__ import annotations

import json
import shlex

from connector.transfer.nixl_agent import NixlAgent

KV_TRANSFER = {
    "kv_connector": "BatonConnector",
    "kv_connector_module_path": "services.worker.engines.vllm.engine_process",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"agent": "bench.silent_agent:SilentAgent"},
}
ENGINE_ARGS = f"--kv-transfer-config {shlex.quote(json.dumps(KV_TRANSFER))}"
"""Of the engine that shall use it."""


class SilentAgent(NixlAgent):
    def notify(self, name: str, message: bytes) -> None:
        """Nothing is sent."""
