"""What the console's page is told, as JSON: one struct for each kind of thing on it.

Seconds are numbers, instants are seconds since 1970, and what nobody knows is null.
"""

from __future__ import annotations

import msgspec

INFO, WARNING, ERROR = "info", "warning", "error"
WELL, STRAINED, ILL = "well", "strained", "ill"


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Base of them."""


class Sentence(View, frozen=True, kw_only=True):
    """One thing about the system's health."""

    level: str
    text: str
    do: str = ""
    """What a person might do about it; empty when that is nothing."""


class Health(View, frozen=True, kw_only=True):
    """All of it, the worst first."""

    status: str
    sentences: list[Sentence]


class WorkerCard(View, frozen=True, kw_only=True):
    """One worker."""

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
    """0.0 to 1.0."""
    hit_ratio: float | None
    """Of the prompt tokens of the last minute, how many were in its own prefix cache."""
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    heard_s_ago: int
    """Whole seconds; 0 while it is heard as it should be."""


class FlowLine(View, frozen=True, kw_only=True):
    """Requests that go from the router to a worker, or KV that goes from worker to worker."""

    source: str = msgspec.field(name="from")
    target: str = msgspec.field(name="to")
    kind: str
    per_s: float
    bytes_per_s: float
    tokens_per_s: float


class PartTime(View, frozen=True, kw_only=True):
    """One part of a time to the first token."""

    name: str
    label: str
    """For people."""
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
    """Read from other workers by the one that computed the prompt."""
    received_tokens: int | None
    """Handed over to the worker that answered."""
    received_bytes: int
    tokens_out: int | None
    ttft_s: float | None
    total_s: float | None
    itl_s: float | None
    ttft_target_s: float | None
    itl_target_s: float | None
    prefill_worker: str
    decode_worker: str
    attempts: int
    resumes: int
    slow: bool
    streamed_handoff: bool
    parts: list[PartTime]
    """Of the time to the first token, in their order; they add up to it. Empty where it is not known."""


class EventLine(View, frozen=True, kw_only=True):
    """Something that happened."""

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


class Page(View, frozen=True, kw_only=True):
    """All that there is to see at one moment."""

    at: float
    mode: str
    """Of requests that ask for none; empty: that is not known."""
    model_names: list[str]
    health: Health
    workers: list[WorkerCard]
    flows: list[FlowLine]
    requests: list[RequestRow]
    """The newest first; likewise the events."""
    events: list[EventLine]
    tenants: list[TenantRow]
