"""Settings of an orchestrator, from ORCHESTRATOR_* variables."""

from __future__ import annotations

from typing import Literal

import msgspec

from services.orchestrator.planner.rules import Rules
from shared.contracts.control import LEADERSHIP_TTL_S


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raises ValueError for settings that cannot work."""

    instance: str = ""
    """One NATS subject token that no other orchestrator has or had; generated when empty."""
    lease_s: float = LEADERSHIP_TTL_S
    """How soon a standby takes over from a leader that died. The same for all orchestrators."""
    planner: Literal["off", "advise", "act"] = "advise"
    """Whether the leader publishes how many workers of which role it wants, and whether it changes the fleet."""
    planner_ttft_s: float = Rules().ttft_s
    """Target for the time to the first token of 95 of 100 requests; 0: no target."""
    planner_itl_s: float = Rules().itl_s
    """Target for the time between tokens, which limits decode batches; 0: no target."""
    planner_workers_min: int = Rules().workers_min
    """Workers of one fleet, all roles together."""
    planner_workers_max: int = Rules().workers_max
    """0: no limit."""
    planner_time_scale: float = 1.0
    """Multiplies all times of the planner: below 1 it reacts sooner, and also to shorter peaks."""
    scaler: Literal["launcher", "webhook", "advice"] = "launcher"
    """Starts and stops workers: `baton up --workers-max`, the webhook ``scaler_url``, or nothing."""
    scaler_url: str = ""
    """POST, with a ``ScaleFleet`` as JSON."""

    def __post_init__(self) -> None:
        if self.scaler == "webhook" and not self.scaler_url:
            raise ValueError("the scaler is a webhook, so ORCHESTRATOR_SCALER_URL must be set")
        if self.planner_time_scale <= 0.0:
            raise ValueError("a planner's time_scale must be above 0")
        if self.planner_workers_min < 1:
            raise ValueError("a fleet needs at least one worker")

    def rules(self) -> Rules:
        """The planner's rules with these targets and limits."""
        rules = Rules(
            ttft_s=self.planner_ttft_s,
            itl_s=self.planner_itl_s,
            workers_min=self.planner_workers_min,
            workers_max=self.planner_workers_max,
        )
        return rules.with_times(self.planner_time_scale)
