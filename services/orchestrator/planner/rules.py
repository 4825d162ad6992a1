"""The planner's targets, limits and reaction times."""

from __future__ import annotations

from typing import Annotated

import msgspec

from services.orchestrator.settings import Settings

MODELS_MAX = 256
"""Models with rules of their own."""
OTHERS = "*"
"""The name that stands for all models without rules of their own."""
TIMES = ("sample_s", "clear_s", "window_s", "lasting_s", "spare_s", "hold_s", "cool_down_s", "refused_s")
"""The times that ``ORCHESTRATOR_PLANNER_TIME_SCALE`` multiplies."""


class ModelRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Targets and limits of one model. Left out: those of all models."""

    ttft_s: Annotated[float, msgspec.Meta(ge=0.0)] | msgspec.UnsetType = msgspec.UNSET
    itl_s: Annotated[float, msgspec.Meta(ge=0.0)] | msgspec.UnsetType = msgspec.UNSET
    workers_min: Annotated[int, msgspec.Meta(ge=1)] | msgspec.UnsetType = msgspec.UNSET
    workers_max: Annotated[int, msgspec.Meta(ge=0)] | msgspec.UnsetType = msgspec.UNSET


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Targets and the limits of the fleet's size come from ``settings``; the defaults of the rest are constants."""

    ttft_s: float = 2.0
    """Target for the time to the first token of 95 of 100 requests; 0: no target."""
    itl_s: float = 0.05
    """Target for the time between tokens, up to which decode batches may grow; 0: no target."""
    load_max: float = 0.85
    """A role with more load is too small: beyond it, queues grow with small variations of the traffic."""
    sample_s: float = 5.0
    """Interval of samples of the fleet."""
    clear_s: float = 60.0
    """Time in which a queue should be worked off: its work divided by this counts as demand."""
    window_s: float = 30.0
    """Work and demand are averaged over this window."""
    lasting_s: float = 15.0
    """Scale up when every sample of this time exceeds the limit."""
    spare_s: float = 60.0
    """Take a worker from a role when the role could do without it in every sample of this time."""
    hold_s: float = 300.0
    """Scale down when the role could do without the worker in every sample of this time."""
    cool_down_s: float = 60.0
    """Nothing is changed for so long after a change, or after a new leader has begun: the effect must show first."""
    refused_s: float = 120.0
    """A refused change is not asked for again for so long, and for twice as long after each further refusal."""
    start_s_max: float = 600.0
    """A worker that was asked for and has not started by then is no longer expected."""
    prefill_min: int = 1
    decode_min: int = 1
    workers_min: int = 1
    """Workers of one fleet, all roles together."""
    workers_max: int = 0
    """Maximum number of workers; 0: no limit."""
    step_max: int = 4
    """Workers asked for at once."""

    models: dict[str, ModelRules] = msgspec.field(default_factory=dict)
    """Models with targets and limits of their own."""

    @classmethod
    def from_settings(cls, settings: Settings) -> Rules:
        """Raises ValueError with a message for the operator."""
        try:
            models = msgspec.json.decode(settings.planner_models.strip().encode() or b"{}", type=dict[str, ModelRules])
        except msgspec.DecodeError as error:
            raise ValueError(f"ORCHESTRATOR_PLANNER_MODELS: {error}") from error
        if len(models) > MODELS_MAX:
            raise ValueError(f"ORCHESTRATOR_PLANNER_MODELS: {len(models)} models; at most {MODELS_MAX} can be planned")
        rules = cls(ttft_s=settings.planner_ttft_s, itl_s=settings.planner_itl_s)
        rules = msgspec.structs.replace(rules.over(models.pop(OTHERS, ModelRules())), models=models)
        for model in (OTHERS, *models):
            least, most = rules.of(model).workers_min, rules.of(model).workers_max
            if 0 < most < least:
                raise ValueError(f"ORCHESTRATOR_PLANNER_MODELS: {model} has workers_min {least}, workers_max {most}")
        return rules.with_times(settings.planner_time_scale)

    def of(self, model: str) -> Rules:
        own = self.models.get(model)
        return self if own is None else self.over(own)

    def over(self, own: ModelRules) -> Rules:
        """These rules, except where ``own`` has others."""
        return msgspec.structs.replace(
            self, **{name: value for name, value in msgspec.structs.asdict(own).items() if value is not msgspec.UNSET}
        )

    def with_times(self, factor: float) -> Rules:
        """These rules with all reaction times multiplied."""
        return msgspec.structs.replace(self, **{name: factor * getattr(self, name) for name in TIMES})
