"""Messages of the planner: how many workers of each role are wanted and why, and the orders that change it;
and the disaggregation report: whether separate prefill and decode workers pay off, as the collector measures it.
"""

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
    """The demand of a model's clients over the planner's window."""

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
    """Arriving work per second divided by what these workers can do per second; above 1, queues grow."""


class PlanDecision(Message, frozen=True, kw_only=True):
    """Orchestrator -> anyone: one scheduling pass of the planner over one model, and its result."""

    number: int
    """Grows by one with each decision of one leader."""
    at_ms: int
    """Wall clock."""
    model: str
    fingerprint: str = ""
    revision: str = ""
    """Revision of the model."""
    demand: Demand
    roles: list[RoleCount]
    action: PlanAction
    worker_id: WorkerId = WorkerId("")
    """CHANGE_ROLE: the worker."""
    role: Role | None = None
    """CHANGE_ROLE: the new role; SCALE: the role of the workers to add or drain."""
    change: int = 0
    """SCALE: number of workers to add; below 0: to drain."""
    why: str = ""
    outcome: str = ""
    """The outcome as text; empty while it is not known."""


class ScaleFleet(Message, frozen=True, kw_only=True):
    """Orchestrator -> launcher: start or stop workers."""

    model: str
    revision: str = ""
    """Revision of the workers; empty: the one that the launcher starts."""
    role: Role
    change: int
    """Number of workers to add; below 0: to drain."""
    why: str = ""


class FleetScaled(Message, frozen=True, kw_only=True):
    """Launcher -> orchestrator: the change that it has begun."""

    change: int = 0
    refusal: str = ""
    """Why it is less than was requested, as text."""


class AskPlans(Message, frozen=True, kw_only=True):
    """Anyone -> orchestrator: the planner's newest decisions."""

    count_max: int = 20


class Plans(Message, frozen=True, kw_only=True):
    """The newest first."""

    mode: str = ""
    """off, advise or act."""
    decisions: list[PlanDecision] = msgspec.field(default_factory=list)


class AskDisaggregationReport(Message, frozen=True, kw_only=True):
    """Any client -> collector."""

    model: str = ""
    """Empty: all models."""


class ReportBucket(Message, frozen=True, kw_only=True):
    """Comparison for one range of prompt lengths."""

    model: str
    tokens_min: int
    tokens_max: int
    """Both bounds are inclusive."""
    disaggregated: int = 0
    """Number of disaggregated requests, likewise ``aggregated``."""
    aggregated: int = 0
    ttft_s: float = 0.0
    """Measured median of the disaggregated requests; likewise ``itl_s`` and ``e2e_s``."""
    itl_s: float = 0.0
    e2e_s: float = 0.0
    other_ttft_s: float = 0.0
    """Median for aggregated serving: measured with enough such requests, else estimated."""
    other_itl_s: float = 0.0
    other_e2e_s: float = 0.0
    measured: bool = False
    """Whether the aggregated latencies were measured."""
    worth: str = ""
    """Whether disaggregation pays off: yes, no or unsure."""
    reason: str = ""


class DisaggregationReport(Message, frozen=True, kw_only=True):
    """Collector -> client."""

    seconds: float = 0.0
    """Length of the window that it covers."""
    buckets: list[ReportBucket] = msgspec.field(default_factory=list)
    summary: str = ""
