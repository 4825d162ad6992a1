"""What an orchestrator can be told, from ORCHESTRATOR_* variables."""

from __future__ import annotations

from typing import Literal

import msgspec

from services.orchestrator.fleet.fleet import Limits
from services.orchestrator.planner.rules import Rules
from shared.contracts.control import LEADERSHIP_TTL_S

RULES = Rules()
"""The planner's defaults; what each of its settings means stands there."""
PREFIX = "planner_"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How patient one orchestrator is, in seconds, and how it plans. Raises ValueError when that cannot be."""

    instance: str = ""
    """One subject token that no other orchestrator has or had; made up when empty."""
    worker_silence_s_max: float = 3.0
    """A ready or draining worker that says nothing for so long is lost. Workers speak at least once a second."""
    unregistered_s_max: float = 10.0
    remember_s: float = 60.0
    """How long lost and gone workers are shown."""
    lease_s: float = LEADERSHIP_TTL_S
    """How soon a standby takes over from a leader that died. The same for all orchestrators."""
    planner: Literal["off", "advise", "act"] = "advise"
    """Whether the leader says how many workers of which role are wanted, and whether it sees to it."""
    planner_look_s: float = 5.0
    """Between two looks at the fleet."""
    planner_role_s_max: float = 60.0
    """For a worker to change its role."""
    planner_ttft_s: float = RULES.ttft_s
    planner_itl_s: float = RULES.itl_s
    planner_load_max: float = RULES.load_max
    planner_clear_s: float = RULES.clear_s
    planner_window_s: float = RULES.window_s
    planner_lasting_s: float = RULES.lasting_s
    planner_spare_s: float = RULES.spare_s
    planner_hold_s: float = RULES.hold_s
    planner_cool_down_s: float = RULES.cool_down_s
    planner_refused_s: float = RULES.refused_s
    planner_start_s_max: float = RULES.start_s_max
    planner_prefill_min: int = RULES.prefill_min
    planner_decode_min: int = RULES.decode_min
    planner_workers_min: int = RULES.workers_min
    planner_workers_max: int = RULES.workers_max
    planner_step_max: int = RULES.step_max
    scaler: Literal["launcher", "webhook", "advice"] = "launcher"
    """Who is asked for more or fewer workers: `baton up --workers-max`, `scaler_url`, or nobody."""
    scaler_url: str = ""
    """POST, with a ``ScaleFleet`` as JSON."""
    scaler_s_max: float = 10.0
    """For an answer."""

    def __post_init__(self) -> None:
        if self.scaler == "webhook" and not self.scaler_url:
            raise ValueError("the scaler is a webhook, so ORCHESTRATOR_SCALER_URL must be set")
        if not 0.0 < self.planner_load_max <= 1.0 or self.planner_look_s <= 0.0:
            raise ValueError("a planner's load_max is above 0 and at most 1, and its look_s is above 0")
        if min(self.planner_prefill_min, self.planner_decode_min, self.planner_workers_min) < 1:
            raise ValueError("a fleet needs at least one worker of each role")

    def planner_rules(self) -> Rules:
        """As the planner wants them."""
        return Rules(**{name: getattr(self, PREFIX + name) for name in Rules.__struct_fields__})

    def limits(self) -> Limits:
        """As the core wants them."""
        return Limits(
            silence_s_max=self.worker_silence_s_max,
            unregistered_s_max=self.unregistered_s_max,
            remember_s=self.remember_s,
        )
