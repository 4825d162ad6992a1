"""How a real engine's reads are spoiled: by ``ForgingAgent`` in the engine, as a test writes into a file."""

from __future__ import annotations

import json
import shlex
from enum import StrEnum

FORGERY_FILE = "TEST_FORGERY_FILE"
"""Variable of the engine's environment: the file with a ``Forgery``."""
KV_TRANSFER = {
    "kv_connector": "BatonConnector",
    "kv_connector_module_path": "services.worker.engines.vllm.engine_process",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"agent": "tests.engines.forging_agent:ForgingAgent"},
}
ENGINE_ARGS = f"--kv-transfer-config {shlex.quote(json.dumps(KV_TRANSFER))}"
"""Of the engine that shall use it."""


class Forgery(StrEnum):
    NONE = ""
    SWAPPED = "swapped"
    """Two blocks of each layer have each other's KV."""
    ZEROED = "zeroed"
    """One layer of a block is zero."""
