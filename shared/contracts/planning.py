"""How many workers of which role are wanted, why, and who is asked to change it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from shared.contracts.ids import WorkerId
from shared.contracts.message import Message
from shared.contracts.workers import Role


class PlanAction(StrEnum):
    """What a planner's decision does."""

    NOTHING = "nothing"
    CHANGE_ROLE = "change_role"
    SCALE = "scale"
    """Ask the scaler for more or fewer workers."""


class Demand(Message, frozen=True, kw_only=True):
    """What a model's clients want, over the planner's window."""

    requests_per_s: float = 0.0
    prompt_tokens: float = 0.0
    """Mean of a request."""
    uncached_tokens: float = 0.0
    """Mean of a request: what has to be computed."""
    completion_tokens: float = 0.0
    """Mean of a request."""
    queue_s: float = 0.0
    """Mean wait before the first leg and in engines' queues, of requests that finished in the window."""
    ttft_s_p95: float = 0.0
    itl_s_p95: float = 0.0
    seconds: float = 0.0
    """Length of the window."""


class RoleCount(Message, frozen=True, kw_only=True):
    """Workers of one role."""

    role: Role
    now: int
    wanted: int
    load: float = 0.0
    """Work that comes per second over what these workers can do per second; above 1 queues grow."""


class PlanDecision(Message, frozen=True, kw_only=True):
    """Orchestrator -> anyone: one scheduling pass of the planner over one model, and its result."""

    number: int
    """Grows by one with each decision of one leader."""
    at_ms: int
    """Wall clock."""
    model: str
    fingerprint: str = ""
    revision: str = ""
    """Of the workers that it is about."""
    demand: Demand
    roles: list[RoleCount]
    action: PlanAction
    worker_id: WorkerId = WorkerId("")
    """CHANGE_ROLE: of whom."""
    role: Role | None = None
    """CHANGE_ROLE, SCALE: to which, of which."""
    change: int = 0
    """SCALE: workers more (or fewer, below 0)."""
    why: str = ""
    """For a person."""
    outcome: str = ""
    """What came of it, in words; empty while that is not known."""


class ScaleFleet(Message, frozen=True, kw_only=True):
    """Orchestrator -> launcher: start or stop workers."""

    model: str
    revision: str = ""
    """Workers of which revision; empty: of whichever the launcher starts."""
    role: Role
    change: int
    """Workers more; below 0: fewer. Those to go are drained."""
    why: str = ""


class FleetScaled(Message, frozen=True, kw_only=True):
    """Launcher -> orchestrator: what it began to do."""

    change: int = 0
    refusal: str = ""
    """Why it is less than was asked for, in words."""


class AskPlans(Message, frozen=True, kw_only=True):
    """Anyone -> orchestrator: the planner's newest decisions."""

    count_max: int = 20


class Plans(Message, frozen=True, kw_only=True):
    """The newest first."""

    mode: str = ""
    """off, advise or act."""
    decisions: list[PlanDecision] = msgspec.field(default_factory=list)
