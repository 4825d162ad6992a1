"""Orders to workers and models: drain, change the role, run the KV self-test, sleep, wake, load LoRA adapters, change
weights.

The workers of a model that sleeps run no engine until a request or an operator wakes them. The orchestrator keeps the
adapters loaded that operators ordered.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum

import msgspec

from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvDigest
from shared.contracts.message import Message
from shared.contracts.workers import Role


class DrainWorker(Message, frozen=True, kw_only=True):
    """Operator or orchestrator -> worker: finish running legs, move hot prefixes to other workers, exit."""

    worker_id: WorkerId
    deadline_s: float | None = None
    """Time for running legs; unfinished ones are then migrated. None: the worker's own ``drain_s_max``."""
    evacuate: bool = True


class OrderTaken(Message, frozen=True, kw_only=True):
    """Worker -> sender of an order: accepted, or why not."""

    worker_id: WorkerId
    epoch: Epoch
    refusal: str = ""
    """Text for people; empty if the order was accepted."""


class WorkerDrained(Message, frozen=True, kw_only=True):
    """Worker -> anyone, just before it exits: the result of the drain."""

    worker_id: WorkerId
    epoch: Epoch
    seconds: float
    """Time from the order to this message."""
    legs: int = 0
    """Legs that ran when the drain began."""
    legs_cut: int = 0
    """Legs that were unfinished at the deadline."""
    prefixes: int = 0
    """Prefixes that other workers took."""
    prefixes_left: int = 0
    """Prefixes that no worker took."""
    blocks: int = 0
    bytes: int = 0
    evacuation_s: float = 0.0
    ordered: bool = False
    """Whether a DrainWorker caused the drain: a supervisor need not restart the process."""


class ChangeRole(Message, frozen=True, kw_only=True):
    """Operator or orchestrator -> worker: serve other kinds of legs. The engine keeps running."""

    worker_id: WorkerId
    role: Role


class RoleChanged(Message, frozen=True, kw_only=True):
    """Worker -> sender of ChangeRole, once the new role is verified."""

    worker_id: WorkerId
    epoch: Epoch
    before: Role
    role: Role
    """The present role."""
    seconds: float = 0.0
    """Time from the order until the registry had the new role and it was verified."""
    legs: int = 0
    """Running at that time; they continue."""
    failure: str = ""
    """Why the role is unchanged, for people."""


LIKELY_TOKENS_MAX = 5


class AskSelfTestPrompt(Message, frozen=True, kw_only=True):
    """Worker -> worker: asks for a new short prompt whose KV the sender can read to verify the exchange."""

    worker_id: WorkerId
    reader_id: WorkerId


class SelfTestPrompt(Message, frozen=True, kw_only=True):
    """Worker -> worker: a prompt, what the worker's engine says comes after it, and digests of the KV that it holds."""

    worker_id: WorkerId
    epoch: Epoch
    tokens: list[int]
    """A few full blocks and a tail."""
    likely: list[int] = msgspec.field(default_factory=list)
    """The tokens that the engine finds most likely to be next, at most ``LIKELY_TOKENS_MAX``; none if it gives no
    probabilities.
    """
    logprobs: list[float] = msgspec.field(default_factory=list)
    """The log probability of each of these tokens."""
    digests: list[KvDigest] = msgspec.field(default_factory=list)
    """Digests of the prompt's full blocks, one for each KV cache group."""


class RunSelfTest(Message, frozen=True, kw_only=True):
    """Worker -> worker: read the KV of my self-test prompt and check it."""

    worker_id: WorkerId
    source_id: WorkerId
    source_epoch: Epoch


class SelfTestResult(Message, frozen=True, kw_only=True):
    """Worker -> worker: the result of the self-test."""

    worker_id: WorkerId
    epoch: Epoch
    fetched_tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    logprob_difference: float = 0.0
    """Largest difference between a token's log probability here and at the holder."""
    failure: str = ""
    """Empty: the KV that was read is the holder's, and the engine computes with it what the holder computes."""


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
    """Time after which a refused model may be woken."""


class OrderModel(Message, frozen=True, kw_only=True):
    """Operator -> orchestrator: put a model's workers to sleep, or wake them."""

    model: str
    asleep: bool


class ModelOrdered(Message, frozen=True, kw_only=True):
    """Orchestrator -> operator: the order is being carried out, or why not."""

    workers: list[WorkerId]
    """Workers that get orders."""
    expected_s: float = 0.0
    """Time until a woken model serves, as far as known."""
    refusal: str = ""


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
    """Key of the key-value store: made of model and name (see ``wanted_key``)."""
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
    """Orders of this orchestrator, the newest first."""


WEIGHTS_BYTES_MAX = 16 << 20
"""Size of what a trainer tells engines about one part of its weights, as JSON."""


class WeightsAction(StrEnum):
    """What an order about a model's weights does, on all its workers. vLLM's calls of these names."""

    PAUSE = "pause"
    """Schedule nothing. ``mode`` says what happens to requests that run."""
    RESUME = "resume"
    LOAD = "load"
    """Load the weights of a folder, in place."""
    INIT = "init"
    """Connect the engine to a trainer."""
    SHUTDOWN = "shutdown"
    START = "start"
    """Begin an update from the trainer."""
    UPDATE = "update"
    """Receive a part of it."""
    FINISH = "finish"


class PauseMode(StrEnum):
    """What happens to requests that run."""

    ABORT = "abort"
    WAIT = "wait"
    """Requests that run end first; those that the engine has not begun wait."""
    KEEP = "keep"
    """Requests that run stop, and go on later from the KV that they have."""


class OrderWeights(Message, frozen=True, kw_only=True):
    """Operator -> orchestrator: an order about a model's weights."""

    action: WeightsAction
    model: str = ""
    """May be left out while the fleet has one model."""
    mode: PauseMode = PauseMode.ABORT
    clear_cache: bool = True
    path: str = ""
    """LOAD: a folder, relative to each worker's WORKER_WEIGHTS_DIR."""
    version: str = ""
    """LOAD, FINISH: the weights' name for people, and vLLM's ``weight_version``."""
    payload: bytes = b""
    """INIT, UPDATE: JSON for the engine's weight transfer."""
    by: str = ""
    """Who gives the order, as the operator's program states it."""


class ChangeWeights(Message, frozen=True, kw_only=True):
    """Orchestrator -> worker: carry this out."""

    worker_id: WorkerId
    action: WeightsAction
    mode: PauseMode = PauseMode.ABORT
    clear_cache: bool = True
    path: str = ""
    version: str = ""
    payload: bytes = b""
    weights: str = ""
    """LOAD, FINISH: what the fingerprint names the new weights."""


class WeightsChanged(Message, frozen=True, kw_only=True):
    """Worker -> orchestrator, once the registry shows the change."""

    worker_id: WorkerId
    epoch: Epoch
    weights: str = ""
    """What its fingerprint names its weights now."""
    seconds: float = 0.0
    failure: str = ""
    """Why it was not carried out, for people."""
    broken: bool = False
    """The worker has neither the old weights nor the new ones, and serves nothing until it has others."""


class WeightsOrdered(Message, frozen=True, kw_only=True):
    """Orchestrator -> operator: the result on each worker."""

    model: str = ""
    weights: str = ""
    """What fingerprints name the model's weights now; empty: those of the workers' start."""
    changes: list[WeightsChanged] = msgspec.field(default_factory=list)
    refusal: str = ""
    """Why no worker got the order, for people."""


class WantedWeights(Message, frozen=True, kw_only=True):
    """Orchestrator -> orchestrators and workers: which weights all workers of a model have."""

    key: str
    """Key of the key-value store: made of the model (see ``weights_key``)."""
    model: str
    weights: str = ""
    """What ``Fingerprint.weights`` must be: a worker with others does not serve."""
    version: str = ""
    path: str = ""
    """The folder that they are from; empty: a trainer sent them, and a worker that starts later cannot get them."""
    paused: bool = False
    """Workers that start later begin paused, too."""
    by: str = ""
    at_ms: int = 0


class AskWeights(Message, frozen=True, kw_only=True):
    """Operator -> orchestrator: which weights models have."""


class ModelWeights(Message, frozen=True, kw_only=True):
    """One model's weights and workers."""

    wanted: WantedWeights
    workers: list[WorkerId]
    """Workers that an order would reach."""
    ranks: int = 0
    """Tensor parallel ranks of all of them."""


class Weights(Message, frozen=True, kw_only=True):
    """Orchestrator -> operator."""

    models: list[ModelWeights] = msgspec.field(default_factory=list)


def weights_key(model: str) -> str:
    """One subject token for each model."""
    return hashlib.sha256(model.encode()).hexdigest()[:32]
