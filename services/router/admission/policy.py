"""The operator's settings of admission."""

from __future__ import annotations

import msgspec

LATE_SHARE_MAX = 1 / 32
"""Share of the engines' time for prompts that even an idle engine would complete after their target. Each of them
delays other requests and gains nothing; without a bound, on the conversation trace at light load, they raised the p95
between tokens from 15 ms to 103 ms. While nothing else runs there is no bound.
"""


class AdmissionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests may wait, how long, and which are rejected instead."""

    queue_max: int = 1024
    """Waiting requests of all models and tenants."""
    tenant_queue_max: int = 1024
    """Waiting requests of one tenant, for each model and priority."""
    queue_s_max: float = 60.0
    """No request waits longer."""
    engine_queue_s_max: float = 0.25
    """A request goes to an engine that is predicted to begin it within this time, or within the time of a mean request
    if that is longer: enough that the engine does not idle until the next one arrives.
    """
    late_ratio: float = 1.0
    """A request is rejected if its first token would come later than this many times its target: it would only make
    other requests late, too.
    """
    serve_late: bool = True
    """Serve requests whose target even an idle worker would miss, while no other request waits and within
    ``LATE_SHARE_MAX``; False: always reject them.
    """
    tenant_weights: dict[str, float] = msgspec.field(default_factory=dict)
    """A tenant of weight 2 may have twice as much as one of weight 1, the default."""
