"""LoRA adapters: orders of operators, and what the orchestrator keeps loaded."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.message import Message

NAME_CHARS_MAX = 128
PATH_CHARS_MAX = 1024
ORDER_WORKERS_MAX = 1024
"""Workers that one order may name."""


class AdapterAction(StrEnum):
    """What an order does."""

    LOAD = "load"
    """Load the adapter, or replace the one that has its name."""
    UNLOAD = "unload"


class OrderAdapter(Message, frozen=True, kw_only=True):
    """Operator -> orchestrator: load or unload an adapter."""

    action: AdapterAction
    name: str
    path: str = ""
    """LOAD: a folder, relative to each worker's WORKER_LORA_DIR."""
    model: str = ""
    """The model that it adapts; may be left out while the fleet has one model."""
    workers: list[WorkerId] = msgspec.field(default_factory=list)
    """Empty: all workers of the model, also those that start later."""
    by: str = ""
    """Who gives the order, as the operator's program states it."""


class ChangeAdapter(Message, frozen=True, kw_only=True):
    """Orchestrator -> worker: load or unload an adapter."""

    worker_id: WorkerId
    action: AdapterAction
    name: str
    path: str = ""


class AdapterChanged(Message, frozen=True, kw_only=True):
    """Worker -> orchestrator, once the registry shows the change."""

    worker_id: WorkerId
    epoch: Epoch
    digest: str = ""
    """LOAD: of the files that were loaded."""
    seconds: float = 0.0
    failure: str = ""
    """Why nothing was changed, for people."""


class AdapterOrdered(Message, frozen=True, kw_only=True):
    """Orchestrator -> operators: an order, with its result on each worker."""

    order: OrderAdapter
    at_ms: int
    """Wall clock."""
    changes: list[AdapterChanged] = msgspec.field(default_factory=list)
    refusal: str = ""
    """Why no worker got the order, for people."""
    automatic: bool = False
    """The orchestrator carries out an earlier order on a worker that has started since."""


class WantedAdapter(Message, frozen=True, kw_only=True):
    """Orchestrator -> orchestrators: an adapter that the operator has ordered."""

    key: str
    """Of the key-value store: made of model and name (see ``wanted_key``)."""
    name: str
    model: str
    path: str
    workers: list[WorkerId] = msgspec.field(default_factory=list)
    """Empty: all workers of the model."""
    by: str = ""
    at_ms: int = 0


class AskAdapters(Message, frozen=True, kw_only=True):
    """Operator -> orchestrator: which adapters are wanted, and the newest orders."""


class Adapters(Message, frozen=True, kw_only=True):
    """Orchestrator -> operator."""

    wanted: list[WantedAdapter] = msgspec.field(default_factory=list)
    orders: list[AdapterOrdered] = msgspec.field(default_factory=list)
    """Of this orchestrator, the newest first."""
