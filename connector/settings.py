"""Settings that the worker passes to its engine's connector: ``kv_connector_extra_config``, read once at start."""

from __future__ import annotations

from typing import Any

import msgspec

from shared.contracts.workers import Fingerprint


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durations are in seconds."""

    worker_id: str
    epoch: int
    fingerprint: Fingerprint
    """Its block size is not valid: vLLM may choose another one while the engine starts."""
    notifications: str = ""
    """ZMQ endpoint at which the worker receives ``EngineNotification``; empty: none."""
    lease_s: float = 30.0
    """Duration of a prefill leg's offer."""
    lease_s_max: float = 60.0
    """Maximum duration of a lease."""
    lease_share_max: float = 0.5
    """Share of the block pool that leases may pin."""
    answer_s_max: float = 0.5
    """Maximum wait for another worker to reply to a lease request."""
    copy_cores: list[int] = msgspec.field(default_factory=list)
    """CPU cores on which the transfer thread may run besides the model's core."""
    refusal_file: str = ""
    """File for the reason if the engine's KV cache cannot be exchanged; empty: none."""
    agent: str = "connector.transfer.nixl_agent:NixlAgent"
    """Class of the transfer agent, as ``module:name``."""

    def fingerprint_key(self, block_tokens: int) -> str:
        """``Fingerprint.key`` of an engine with blocks of so many tokens."""
        return msgspec.structs.replace(self.fingerprint, block_size=block_tokens).key()


def read(extra: dict[str, Any]) -> Settings:
    """Raises ValueError naming the wrong setting."""
    try:
        return msgspec.convert(extra, Settings)
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_connector_extra_config of the Baton connector: {error}") from error
