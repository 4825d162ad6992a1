"""Models that sleep: their workers run no engine until a request or an operator wakes them."""

from __future__ import annotations

from shared.contracts.ids import WorkerId
from shared.contracts.message import Message


class SleepWorker(Message, frozen=True, kw_only=True):
    """Orchestrator -> worker: finish running legs, end the engine and wait to be woken."""

    worker_id: WorkerId


class WakeWorker(Message, frozen=True, kw_only=True):
    """Orchestrator -> worker: start the engine."""

    worker_id: WorkerId


class WakeModel(Message, frozen=True, kw_only=True):
    """Router -> orchestrator: a request waits for this model. Repeated while one does."""

    model: str
    """The primary name."""


class ModelWaking(Message, frozen=True, kw_only=True):
    """Orchestrator -> router: whether the model will serve, and when."""

    asleep: bool = False
    """False: its workers neither sleep nor are being woken."""
    expected_s: float = 0.0
    """Until it serves, as far as known."""
    refusal: str = ""
    """Why it is not woken, for people."""
    retry_after_s: float = 0.0
    """With a refusal: when it may be woken."""


class OrderModel(Message, frozen=True, kw_only=True):
    """Operator -> orchestrator: put a model's workers to sleep, or wake them."""

    model: str
    asleep: bool


class ModelOrdered(Message, frozen=True, kw_only=True):
    """Orchestrator -> operator: the order is being carried out, or why not."""

    workers: list[WorkerId]
    """That get orders."""
    expected_s: float = 0.0
    """To wake: until the model serves, as far as known."""
    refusal: str = ""
