"""The operator's limits on waiting requests."""

from __future__ import annotations

import msgspec


class AdmissionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on waiting requests, and which requests are rejected."""

    queue_max: int = 1024
    """Waiting requests of all models and tenants."""
    tenant_queue_max: int = 1024
    """Waiting requests of one tenant, for each model and priority."""
    queue_s_max: float = 60.0
    """Longest wait of a request."""
    engine_queue_s_max: float = 0.25
    """A request goes to an engine that is predicted to begin it within this time, or within the time of a mean request
    if that is longer: enough that the engine does not idle until the next one arrives. Until then it waits in the
    router, which can still place it anywhere.
    """
    late_ratio: float = 1.0
    """A request is rejected if its first token would come later than this many times its target: it would only make
    other requests late, too.
    """
    serve_late: bool = True
    """Serve requests whose target even an idle worker would miss, while the load is low and within ``LATE_SHARE_MAX``;
    False: always reject them.
    """
    tenant_weights: dict[str, float] = {}
    """A tenant of weight 2 may have twice as much as one of weight 1, the default."""
