"""Service status, leadership, default mode and tokenizer messages."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.message import Message

LEADERSHIP_TTL_S = 6.0
"""A leadership entry expires without renewal after this: longer than a JetStream leader election (5 s)."""


class ServicePhase(StrEnum):
    """The life of every service process."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


ROUTER_TROUBLES_MAX = 32
"""Maximum number of workers that a RouterHealth names."""


class RouterHealth(Message, frozen=True, kw_only=True):
    """Workers whose state a router does not know exactly; empty when the router is healthy."""

    not_exact: dict[str, str] = msgspec.field(default_factory=dict)
    """Workers whose prefix index is not exact, and the state that it is in: degraded or fallback."""
    tokens_differ: list[WorkerId] = msgspec.field(default_factory=list)
    """Workers whose engines make other tokens of a text than this router."""
    tokenizers_failed: dict[str, str] = msgspec.field(default_factory=dict)
    """Models whose tokenizer or chat template the router does not use, and why."""
    is_index_compiled: bool = True
    is_placement_compiled: bool = True
    is_tokenization_compiled: bool = True
    is_request_path_compiled: bool = True


class DiskFolder(StrEnum):
    """What a process of Baton writes to disk."""

    STATE = "state"
    LOGS = "logs"
    NATS = "nats"
    """JetStream's store, where `baton up` runs NATS."""
    KV_STORE = "kv_store"


DISK_LOW, DISK_MIN = (0.1, 20e9), (0.02, 2e9)
"""Little is free, and almost nothing: less than this share of the file system, and less than these bytes."""


class DiskSpace(Message, frozen=True, kw_only=True):
    """Space of the file system that has the folder."""

    folder: DiskFolder
    free_bytes: int
    """Space that this process's user can fill."""
    size_bytes: int

    def is_below(self, limit: tuple[float, float]) -> bool:
        """Whether less is free than this share of the file system, and than these bytes."""
        share, bytes_min = limit
        return self.free_bytes < min(share * self.size_bytes, bytes_min)


class ProcessUse(Message, frozen=True, kw_only=True):
    """What a process uses of its machine; its child processes are not included."""

    rss_bytes: int = 0
    """Resident memory."""
    cpu_s: float = 0.0
    """CPU time since the process started."""
    open_files: int = 0
    """Open file descriptors."""
    open_files_max: int = 0
    """The limit of open file descriptors; 0: none."""
    loop_lag_s: float = 0.0
    """Longest delay of the event loop in the last seconds."""


class ServiceStatus(Message, frozen=True, kw_only=True):
    """Service -> anyone: its phase and address, on each change and every two seconds."""

    service: str
    """router, orchestrator, collector or worker."""
    instance: str
    """One subject token: the worker id, or a name unique among the service's processes."""
    phase: ServicePhase
    detail: str = ""
    """Present activity, for people: "loading weights"."""
    pid: int = 0
    url: str = ""
    """Address of the HTTP endpoint, if there is one."""
    version: str = ""
    """Version of Baton."""
    host: str = ""
    """The machine's name."""
    at_ms: int = 0
    """Wall clock of the sender."""
    warning: str = ""
    """What an operator must correct, although the process serves: it is degraded. Empty when there is nothing."""
    router: RouterHealth | None = None
    """None for other services than routers."""
    disks: list[DiskSpace] = msgspec.field(default_factory=list)
    """One for each file system that this process writes to."""
    process: ProcessUse = ProcessUse()
    refused_connections: int = 0
    """Connections of clients for which almost no file descriptor was left."""


class AskTokenizer(Message, frozen=True, kw_only=True):
    """Router -> worker: asks for the tokenizer of its engine."""

    worker_id: WorkerId


class TokenizerAsset(Message, frozen=True, kw_only=True):
    """Worker -> router: the engine's own tokenizer, so that a router needs neither disk nor hub."""

    worker_id: WorkerId
    epoch: Epoch
    tokenizer_json: bytes = b""
    """A Hugging Face ``tokenizer.json``; empty when the model has none."""
    chat_template: str = ""
    """Jinja source; empty when the model has none."""
    special_tokens: dict[str, str] = msgspec.field(default_factory=dict)
    """Template variables such as ``bos_token``."""
    adds_special_tokens: bool = True
    """Whether /v1/completions prompts get the tokenizer's special tokens."""
    note: str = ""


class ProbePrompt(Message, frozen=True, kw_only=True):
    """A request that is only tokenized."""

    path: str
    body: bytes


class AskTokens(Message, frozen=True, kw_only=True):
    """Router -> worker: asks for the tokens and block hashes of prompts."""

    worker_id: WorkerId
    prompts: list[ProbePrompt]


class PromptTokens(Message, frozen=True, kw_only=True):
    """One prompt as the engine tokenizes it."""

    tokens: list[int]
    hashes: bytes
    """Hashes of the full blocks, packed (see ``kv_events.pack_hashes``)."""
    refusal: str = ""
    """Why the engine does not tokenize it."""


class TokensFound(Message, frozen=True, kw_only=True):
    """Worker -> router: one result per prompt."""

    worker_id: WorkerId
    epoch: Epoch
    prompts: list[PromptTokens]


class Leadership(Message, frozen=True, kw_only=True):
    """Orchestrator -> orchestrators: the leader, and its term, which grows with each change."""

    role: str
    leader: str
    term: int


FLEET = "fleet"
"""The only scope: all routers."""
DEFAULT_MODES = ("auto", "aggregated", "disaggregated")
"""Values of ``DefaultMode.mode``; auto lets placement choose."""


class DefaultMode(Message, frozen=True, kw_only=True):
    """Operator -> routers: the mode of requests that ask for none."""

    scope: str = FLEET
    mode: str = "auto"
