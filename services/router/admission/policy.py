"""What the operator decided about waiting."""

from __future__ import annotations

import msgspec

LATE_SHARE_MAX = 1 / 32
"""Of the engines' time, for prompts that are served though even an idle engine would be late with them. Where nothing
else runs they harm nobody, and there is no such bound.
"""


class AdmissionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How many may wait, how long, and who is not let in to wait at all."""

    queue_max: int = 1024
    """Requests that wait, of all models and tenants."""
    tenant_queue_max: int = 1024
    """Requests of one tenant that wait, at each model and priority."""
    queue_s_max: float = 60.0
    """Nobody waits longer."""
    engine_queue_s_max: float = 0.25
    """A request goes to an engine that is predicted to begin it within so long, or within what usual requests take:
    enough that it does not idle until the next one arrives.
    """
    late_ratio: float = 1.0
    """A request whose first token would come later than so many times its target is refused: it would only make others
    late, too.
    """
    serve_late: bool = True
    """A request whose target even an idle worker would miss is served in calm times, as long as such requests take no
    more than ``LATE_SHARE_MAX``; or else it is refused always.
    """
    tenant_weights: dict[str, float] = msgspec.field(default_factory=dict)
    """A tenant of weight 2 may have twice as much as one of weight 1, which is everybody's."""
