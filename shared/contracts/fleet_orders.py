"""What a worker is told to do with itself: leave, change its role, prove that it can read another's KV."""

from __future__ import annotations

import msgspec

from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.message import Message
from shared.contracts.workers import Role


class DrainWorker(Message, frozen=True, kw_only=True):
    """Operator or orchestrator -> worker: finish what runs, move the hot prefixes to those that stay, leave."""

    worker_id: WorkerId
    deadline_s: float | None = None
    """For running legs; those that are left then go on elsewhere. None: the worker's own ``drain_s_max``."""
    evacuate: bool = True


class OrderTaken(Message, frozen=True, kw_only=True):
    """Worker -> whoever gave it an order: it is being carried out, or why not."""

    worker_id: WorkerId
    epoch: Epoch
    refusal: str = ""
    """In words; empty when the order was taken."""


class WorkerDrained(Message, frozen=True, kw_only=True):
    """Worker -> anyone, just before it leaves: how that went."""

    worker_id: WorkerId
    epoch: Epoch
    seconds: float
    """From the order to here."""
    legs: int = 0
    """Running when it began."""
    legs_cut: int = 0
    """Of those, not done at the deadline."""
    prefixes: int = 0
    """Moved to workers that stay."""
    prefixes_left: int = 0
    """Nobody could take these."""
    blocks: int = 0
    bytes: int = 0
    evacuation_s: float = 0.0
    ordered: bool = False
    """By DrainWorker: whoever supervises the process need not start it again."""


class ChangeRole(Message, frozen=True, kw_only=True):
    """Operator or orchestrator -> worker: be placed for other legs from now on. The engine runs on."""

    worker_id: WorkerId
    role: Role


class RoleChanged(Message, frozen=True, kw_only=True):
    """Worker -> whoever asked for it, when the new role is verified."""

    worker_id: WorkerId
    epoch: Epoch
    before: Role
    role: Role
    """The one that it has now."""
    seconds: float = 0.0
    """From the order until the registry had the new role and it was verified."""
    legs: int = 0
    """Running at the time; none of them is disturbed."""
    failure: str = ""
    """Why the role is as before, in words."""


class AskSelfTestPrompt(Message, frozen=True, kw_only=True):
    """Worker -> worker: compute a short prompt that is yours alone, so that I can read its KV and prove it."""

    worker_id: WorkerId
    reader_id: WorkerId


class SelfTestPrompt(Message, frozen=True, kw_only=True):
    """The prompt, and what its own engine answers to it."""

    worker_id: WorkerId
    epoch: Epoch
    tokens: list[int]
    """A few full blocks and a tail."""
    answer: list[int]
    """Token ids that follow, greedily."""


class RunSelfTest(Message, frozen=True, kw_only=True):
    """Worker -> worker: read the KV of my self-test prompt and check that you generate the same tokens."""

    worker_id: WorkerId
    source_id: WorkerId
    source_epoch: Epoch


class SelfTestResult(Message, frozen=True, kw_only=True):
    """How that went."""

    worker_id: WorkerId
    epoch: Epoch
    fetched_tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failure: str = ""
    """Empty: the KV that was read gives the very tokens that its holder gave."""
    tokens: list[int] = msgspec.field(default_factory=list)
    """What the reader's engine answered."""
