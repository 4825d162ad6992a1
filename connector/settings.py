"""What the worker tells its engine's connector at start: ``kv_connector_extra_config``, read once, whole."""

from __future__ import annotations

from typing import Any

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module. Seconds."""

    worker_id: str
    epoch: int
    fingerprint: str
    notifications: str = ""
    """ZMQ endpoint where the worker takes ``EngineNotification``; empty: nobody listens."""
    lease_s: float = 30.0
    """How long a prefill leg's blocks stay for a decode worker that does not come."""
    lease_s_max: float = 60.0
    """The most that anybody is granted."""
    lease_share_max: float = 0.5
    """Of the block pool, pinned by leases."""
    answer_s_max: float = 0.5
    """For another worker to answer an ask for blocks."""
    copy_cores: list[int] = msgspec.field(default_factory=list)
    """Where the thread that copies may run besides the model's own core."""
    agent: str = "connector.transfer.nixl_agent:NixlAgent"
    """Where the transfer agent's class is, as ``module:name``."""


def read(extra: dict[str, Any]) -> Settings:
    """Raises ValueError naming what is wrong."""
    try:
        return msgspec.convert(extra, Settings)
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_connector_extra_config of the Baton connector: {error}") from error
