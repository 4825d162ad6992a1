"""The operator's limits on waiting requests."""

from __future__ import annotations

import msgspec

from services.router.placement.slo import read_slos
from services.router.settings import Settings
from shared.contracts.ids import is_subject_token

WEIGHT_MIN, WEIGHT_MAX = 0.01, 100.0


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

    @classmethod
    def from_settings(cls, settings: Settings) -> AdmissionPolicy:
        """Raises ValueError with a message for the operator."""
        try:
            weights = read_weights(settings.tenant_weights)
        except ValueError as error:
            raise ValueError(f"ROUTER_TENANT_WEIGHTS: {error}") from error
        return cls(
            queue_max=settings.queue_max,
            tenant_queue_max=settings.tenant_queue_max,
            queue_s_max=settings.queue_s_max,
            serve_late=read_slos(settings.slos).serve_late,
            tenant_weights=weights,
        )


def read_weights(text: str) -> dict[str, float]:
    """Tenants' weights from the operator's JSON. Raises ValueError with a message for the operator."""
    try:
        weights = msgspec.json.decode(text.encode() or b"{}", type=dict[str, float])
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    for tenant, weight in weights.items():
        if tenant and not is_subject_token(tenant):
            raise ValueError(f"{tenant!r} cannot be a tenant: use letters, digits, underscores and hyphens")
        if not WEIGHT_MIN <= weight <= WEIGHT_MAX:
            raise ValueError(f"the weight of {tenant} is {weight:g}; it must be {WEIGHT_MIN:g} to {WEIGHT_MAX:g}")
    return weights
