"""The console page's JSON: one struct for each kind of item.

Durations are in seconds, instants in seconds since 1970, and unknown values are null.
"""

from __future__ import annotations

import msgspec

INFO, WARNING, ERROR = "info", "warning", "error"
HEALTHY, DEGRADED, UNHEALTHY = "healthy", "degraded", "unhealthy"


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Base class."""


class Sentence(View, frozen=True):
    """One finding about the system's health."""

    level: str
    text: str
    action: str = ""
    """What the operator can do about it; may be empty."""


class Health(View, frozen=True, kw_only=True):
    """Status and findings, the worst first."""

    status: str
    sentences: list[Sentence]


class WorkerCard(View, frozen=True, kw_only=True):
    id: str
    role: str
    phase: str
    model: str
    engine: str
    revision: str
    host: str
    note: str
    running: int
    waiting: int
    waiting_tokens: int
    legs: int
    kv_used: float
    """Share of the KV memory in use, 0.0 to 1.0."""
    hit_ratio: float | None
    """Share of the last minute's prompt tokens that were in its own prefix cache."""
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    heard_s_ago: int
    """Whole seconds since its last report; 0 while reports arrive on time."""
    adapters: list[str]
    """LoRA adapters that it has loaded, each with the beginning of its files' digest."""


class FlowLine(View, frozen=True, kw_only=True):
    """Requests from the router to a worker, or KV from one worker to another."""

    source: str = msgspec.field(name="from")
    target: str = msgspec.field(name="to")
    kind: str
    per_s: float
    bytes_per_s: float
    tokens_per_s: float


class PartTime(View, frozen=True, kw_only=True):
    """One part of the time to the first token."""

    name: str
    label: str
    """Display name."""
    seconds: float


class RequestRow(View, frozen=True, kw_only=True):
    """One finished request."""

    id: str
    trace_id: str
    decision_id: str
    ended_at: float
    tenant: str
    model: str
    mode: str
    status: int
    reason: str
    prompt_tokens: int | None
    cached_tokens: int | None
    fetched_tokens: int | None
    """Prompt tokens that the prefill worker read from other workers."""
    tokens_out: int | None
    ttft_s: float | None
    total_s: float | None
    itl_s: float | None
    prefill_worker: str
    decode_worker: str
    attempts: int
    resumes: int
    is_batch: bool
    """A line of a batch, for which no user waits."""
    slow: bool
    parts: list[PartTime]
    """Parts of the time to the first token, in order; they add up to it. Empty when not known."""


class EventLine(View, frozen=True, kw_only=True):
    at: float
    level: str
    kind: str
    """lifecycle, planner, service, action or health."""
    subject: str
    text: str


class TenantRow(View, frozen=True, kw_only=True):
    """One tenant's last minute."""

    tenant: str
    requests_per_s: float
    tokens_per_s: float
    refused_per_s: float
    cached_ratio: float | None


class ModelRow(View, frozen=True, kw_only=True):
    """One model: its workers, and its last minute."""

    model: str
    ready: dict[str, int]
    """Ready workers by role."""
    requests_per_s: float
    tokens_in_per_s: float
    """Prompt tokens of finished requests."""
    tokens_out_per_s: float
    failed_per_s: float
    ttft_s: float | None
    """Mean time to the first token."""


class KeyUsage(View, frozen=True, kw_only=True):
    """What one API key used of one model in this month."""

    tenant: str
    key: str
    """Name of the key or the beginning of its digest; empty for requests without a key."""
    model: str
    requests: int
    failed: int
    prompt_tokens: int
    cached_ratio: float | None
    completion_tokens: int
    engine_s: float
    """Estimated engine time."""
    budget_tokens: int | None
    """Budget of the key, for the month."""
    budget_used: float | None
    """Share of the budget, by the key's use of all models."""


class UsageTable(View, frozen=True, kw_only=True):
    """Usage of one month, the largest rows first."""

    month: str
    """The month in UTC, such as 2026-11."""
    rows: list[KeyUsage]
    more: int
    """Rows that are left out."""


NO_USAGE = UsageTable(month="", rows=[], more=0)


class BatchRow(View, frozen=True, kw_only=True):
    id: str
    tenant: str
    status: str
    created_at: float
    total: int
    """Lines; 0 before they have been counted."""
    completed: int
    failed: int
    router: str
    """Router that runs the batch now; empty: none, or it has ended."""
    fault: str
    """Why the batch failed; empty when it has not."""


class BatchTable(View, frozen=True, kw_only=True):
    """Batches: those that run, then those that ended last."""

    rows: list[BatchRow]
    more: int
    """Rows that are left out."""


NO_BATCHES = BatchTable(rows=[], more=0)


class Page(View, frozen=True, kw_only=True):
    at: float
    default_mode: str
    """Mode of requests that do not ask for one; empty when not known."""
    model_names: list[str]
    health: Health
    workers: list[WorkerCard]
    flows: list[FlowLine]
    requests: list[RequestRow]
    """Newest requests first; ``events`` have the same order."""
    events: list[EventLine]
    tenants: list[TenantRow]
    models: list[ModelRow]
    usage: UsageTable = NO_USAGE
    batches: BatchTable = NO_BATCHES
