"""The channel table: every subject on the bus, with its message, delivery, senders and receivers.

A placeholder in a subject is a field of the message, so address and body cannot disagree. What a worker sends names it
in the subject, so that NATS can refuse it to the key of another worker. The catalogue, the AsyncAPI file and the NATS
permissions are generated from these rows (see ``catalogue``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec

from shared.contracts.batches import FilePart, StoredBatch, StoredFile
from shared.contracts.control import (
    AskTokenizer,
    AskTokens,
    DefaultMode,
    Leadership,
    ServiceStatus,
    TokenizerAsset,
    TokensFound,
)
from shared.contracts.decisions import AskDecision, FoundDecision
from shared.contracts.fleet_orders import (
    AdapterChanged,
    AdapterOrdered,
    Adapters,
    AskAdapters,
    AskSelfTestPrompt,
    AskWeights,
    ChangeAdapter,
    ChangeRole,
    ChangeWeights,
    DrainWorker,
    ModelOrdered,
    ModelWaking,
    OrderAdapter,
    OrderModel,
    OrderTaken,
    OrderWeights,
    RoleChanged,
    RunSelfTest,
    SelfTestPrompt,
    SelfTestResult,
    SleepWorker,
    WakeModel,
    WakeWorker,
    WantedAdapter,
    WantedWeights,
    Weights,
    WeightsChanged,
    WeightsOrdered,
    WorkerDrained,
)
from shared.contracts.inference import (
    CancelLeg,
    FrameBatch,
    PrefetchedKv,
    PrefetchKv,
    RenderedPrompt,
    RenderPrompt,
    RequestsFinished,
    StartLeg,
)
from shared.contracts.kv_events import AskKvSnapshot, KvEventBatch, KvSnapshot
from shared.contracts.kv_exchange import AskKvHandshake, FetchedKv, FetchKv, KvGrant, KvHandshake, LeaseKv, ReleaseKv
from shared.contracts.load import LoadReport
from shared.contracts.planning import (
    AskDisaggregationReport,
    AskPlans,
    DisaggregationReport,
    FleetScaled,
    PlanDecision,
    Plans,
    ScaleFleet,
)
from shared.contracts.profiling import ProfileStopped, ReadTrace, StartProfile, StopProfile, TracePart
from shared.contracts.routers import AskResponse, Reservations, ResponsePart, ResponseRuns
from shared.contracts.usage import ReportUsage, UsageMonth, UsageStored
from shared.contracts.workers import DescribeFleet, FleetState, WorkerLost, WorkerRecord

M = TypeVar("M", bound=msgspec.Struct)
A = TypeVar("A", bound=msgspec.Struct)
P = TypeVar("P", bound=msgspec.Struct)

PLACEHOLDER = re.compile(r"\{(\w+)\}")


class Party(StrEnum):
    """A kind of process that sends or receives on a channel."""

    ROUTER = "router"
    ORCHESTRATOR = "orchestrator"
    COLLECTOR = "collector"
    WORKER = "worker"
    LAUNCHER = "launcher"
    """The ``baton`` command: up, workers, health."""


class Delivery(StrEnum):
    """The delivery guarantee of a channel."""

    EVENT = "event"
    """Core NATS, at most once, to every subscriber."""
    COMMAND = "command"
    """Core NATS, at most once, to one receiver; the sender learns at once if the subject has no subscriber."""
    ASK = "ask"
    """Core NATS request and reply; the sender learns at once if there is no responder."""
    KEY_VALUE = "key_value"
    """JetStream key-value store: the newest value per key is durable, can be watched, and expires if not renewed."""


_NAMES_SENDER = (Delivery.EVENT, Delivery.KEY_VALUE)


@dataclass(frozen=True)
class Channel(Generic[M]):
    """One row: where ``message`` travels. For KEY_VALUE channels the subject is ``bucket.{key}``."""

    subject: str
    message: type[M]
    delivery: Delivery
    senders: tuple[Party, ...]
    receivers: tuple[Party, ...]
    sent_by: str = field(default="", kw_only=True)
    """The placeholder that names the sender, where another names the receiver. Without it, all placeholders of an event
    or a key-value entry name the sender, and all of a command or an ask the receiver.
    """
    parts: tuple[str, ...] = field(init=False, repr=False)
    sender_parts: tuple[str, ...] = field(init=False, repr=False)
    """The placeholders that name the sender; the others name the receiver."""
    address: Callable[[M], str] = field(init=False, repr=False, compare=False)
    """The subject of a message on this channel."""
    ids: Callable[[M], object] = field(init=False, repr=False, compare=False)
    """What a message's subject depends on: equal ids, equal subjects."""

    def __post_init__(self) -> None:
        names = tuple(PLACEHOLDER.findall(self.subject))
        fields = {f.name for f in msgspec.structs.fields(self.message)}
        if missing := [name for name in names if name not in fields]:
            raise ValueError(f"{self.subject}: {self.message.__name__} has no field {', '.join(missing)}")
        sender = (self.sent_by,) if self.sent_by else names if self.delivery in _NAMES_SENDER else ()
        if not set(sender) <= set(names):
            raise ValueError(f"{self.subject} has no placeholder {self.sent_by}")
        object.__setattr__(self, "parts", names)
        object.__setattr__(self, "sender_parts", sender)
        object.__setattr__(self, "address", PLACEHOLDER.sub(r"{0.\1}", self.subject).format)
        object.__setattr__(self, "ids", attrgetter(*names) if names else lambda _message: ())

    def filter(self, **ids: str) -> str:
        """The subject to subscribe to: placeholders that are not given become wildcards."""
        if unknown := set(ids) - set(self.parts):
            raise ValueError(f"{self.subject} has no placeholder {', '.join(sorted(unknown))}")
        return PLACEHOLDER.sub(lambda found: ids.get(found[1], "*"), self.subject)

    def read_as(self, message: type[P]) -> Channel[P]:
        """The channel for a receiver that needs only the fields of ``message``, a base of the row's message."""
        if not issubclass(self.message, message):
            raise TypeError(f"{message.__name__} is no part of {self.message.__name__}")
        return Channel(self.subject, message, self.delivery, self.senders, self.receivers, sent_by=self.sent_by)


@dataclass(frozen=True)
class AskChannel(Channel[M], Generic[M, A]):
    """A row whose receiver replies."""

    answer: type[A] = field(kw_only=True)
    names_alike: Callable[[M, A], bool] = field(init=False, repr=False, compare=False)
    """Whether a reply has the ids of its ask: a worker replies to what it was asked, in no other's name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fields = {f.name for f in msgspec.structs.fields(self.answer)}
        names = [name for name in self.parts if name in fields]
        ids = attrgetter(*names) if names else lambda _message: ()
        object.__setattr__(self, "names_alike", lambda message, answer: ids(message) == ids(answer))


ROUTERS = (Party.ROUTER,)
WORKERS = (Party.WORKER,)
EVERYONE = (Party.ROUTER, Party.ORCHESTRATOR, Party.COLLECTOR, Party.LAUNCHER)
OPERATORS = (Party.COLLECTOR, Party.LAUNCHER)
"""Where an operator looks at the system and gives orders: the console and the command line."""

START_LEG = Channel("leg.{worker_id}.start", StartLeg, Delivery.COMMAND, ROUTERS, WORKERS)
CANCEL_LEG = Channel("leg.{worker_id}.cancel", CancelLeg, Delivery.COMMAND, ROUTERS, WORKERS)
FRAMES = Channel("frames.{router_id}.{worker_id}", FrameBatch, Delivery.COMMAND, WORKERS, ROUTERS, sent_by="worker_id")

KV_EVENTS = Channel("kv.{worker_id}.events", KvEventBatch, Delivery.EVENT, WORKERS, ROUTERS)
# Of one epoch: an older process of the same worker that still runs must not answer in the place of the newest.
KV_SNAPSHOT = AskChannel(
    "kv.{worker_id}.snapshot.{epoch}", AskKvSnapshot, Delivery.ASK, ROUTERS, WORKERS, answer=KvSnapshot
)
KV_HANDSHAKE = AskChannel(
    "kv.{worker_id}.handshake.{reader_id}",
    AskKvHandshake,
    Delivery.ASK,
    WORKERS,
    WORKERS,
    answer=KvHandshake,
    sent_by="reader_id",
)
KV_LEASE = Channel("kv.{worker_id}.lease.{reader_id}", LeaseKv, Delivery.COMMAND, WORKERS, WORKERS, sent_by="reader_id")
KV_GRANT = Channel("kv.{reader_id}.grant.{worker_id}", KvGrant, Delivery.COMMAND, WORKERS, WORKERS, sent_by="worker_id")
KV_RELEASE = Channel(
    "kv.{worker_id}.release.{reader_id}", ReleaseKv, Delivery.COMMAND, WORKERS, WORKERS, sent_by="reader_id"
)
KV_FETCH = AskChannel(
    "kv.{worker_id}.fetch.{sender_id}", FetchKv, Delivery.ASK, WORKERS, WORKERS, answer=FetchedKv, sent_by="sender_id"
)
KV_PREFETCH = AskChannel("kv.{worker_id}.prefetch", PrefetchKv, Delivery.ASK, ROUTERS, WORKERS, answer=PrefetchedKv)
TOKENIZER = AskChannel(
    "worker.{worker_id}.tokenizer", AskTokenizer, Delivery.ASK, ROUTERS, WORKERS, answer=TokenizerAsset
)

TOKENS = AskChannel("worker.{worker_id}.tokens", AskTokens, Delivery.ASK, ROUTERS, WORKERS, answer=TokensFound)
RENDER = AskChannel("worker.{worker_id}.render", RenderPrompt, Delivery.ASK, ROUTERS, WORKERS, answer=RenderedPrompt)

RESERVATIONS = Channel("router.{router_id}.reserved", Reservations, Delivery.EVENT, ROUTERS, ROUTERS)
DECISION = AskChannel(
    "router.{router_id}.decision",
    AskDecision,
    Delivery.ASK,
    (Party.ROUTER, Party.COLLECTOR, Party.LAUNCHER),
    ROUTERS,
    answer=FoundDecision,
)

LOAD = Channel("worker.{worker_id}.load", LoadReport, Delivery.EVENT, WORKERS, EVERYONE)
# Workers watch the registry too, to find peers for the KV exchange.
WORKER_RECORDS = Channel("workers.{worker_id}", WorkerRecord, Delivery.KEY_VALUE, WORKERS, (*EVERYONE, *WORKERS))
WORKER_LOST = Channel(
    "fleet.lost", WorkerLost, Delivery.EVENT, (Party.ORCHESTRATOR,), (Party.ROUTER, Party.COLLECTOR, *WORKERS)
)
# The orchestrator hears itself: while it hears nothing, no worker's silence counts.
FLEET_STATE = Channel(
    "fleet.state", FleetState, Delivery.EVENT, (Party.ORCHESTRATOR,), (Party.ORCHESTRATOR, Party.COLLECTOR)
)
DESCRIBE_FLEET = AskChannel(
    "fleet.describe", DescribeFleet, Delivery.ASK, (Party.LAUNCHER,), (Party.ORCHESTRATOR,), answer=FleetState
)

DRAIN = AskChannel("worker.{worker_id}.drain", DrainWorker, Delivery.ASK, OPERATORS, WORKERS, answer=OrderTaken)
DRAINED = Channel(
    "worker.{worker_id}.drained",
    WorkerDrained,
    Delivery.EVENT,
    WORKERS,
    # On a host that joined with a token, the launcher uses the key of one of its workers.
    (*OPERATORS, *WORKERS),
)
CHANGE_ROLE = AskChannel(
    "worker.{worker_id}.role", ChangeRole, Delivery.ASK, (Party.ORCHESTRATOR, *OPERATORS), WORKERS, answer=RoleChanged
)
# A profile slows an engine down, and its traces name requests: only the command line starts and reads one.
START_PROFILE = AskChannel(
    "worker.{worker_id}.profile", StartProfile, Delivery.ASK, (Party.LAUNCHER,), WORKERS, answer=OrderTaken
)
STOP_PROFILE = AskChannel(
    "worker.{worker_id}.profile_stop", StopProfile, Delivery.ASK, (Party.LAUNCHER,), WORKERS, answer=ProfileStopped
)
READ_TRACE = AskChannel(
    "worker.{worker_id}.profile_trace", ReadTrace, Delivery.ASK, (Party.LAUNCHER,), WORKERS, answer=TracePart
)
SELF_TEST_PROMPT = AskChannel(
    "worker.{worker_id}.self_test_prompt.{reader_id}",
    AskSelfTestPrompt,
    Delivery.ASK,
    WORKERS,
    WORKERS,
    answer=SelfTestPrompt,
    sent_by="reader_id",
)
RUN_SELF_TEST = AskChannel(
    "worker.{worker_id}.self_test.{source_id}",
    RunSelfTest,
    Delivery.ASK,
    WORKERS,
    WORKERS,
    answer=SelfTestResult,
    sent_by="source_id",
)

# Only an orchestrator's key can make a worker load an adapter; operators' orders go through it and are logged there.
ORDER_ADAPTER = AskChannel(
    "fleet.adapter", OrderAdapter, Delivery.ASK, (*OPERATORS, *ROUTERS), (Party.ORCHESTRATOR,), answer=AdapterOrdered
)
CHANGE_ADAPTER = AskChannel(
    "worker.{worker_id}.adapter", ChangeAdapter, Delivery.ASK, (Party.ORCHESTRATOR,), WORKERS, answer=AdapterChanged
)
ADAPTER_ORDERED = Channel(
    "fleet.adapter_ordered", AdapterOrdered, Delivery.EVENT, (Party.ORCHESTRATOR,), (Party.COLLECTOR,)
)
DESCRIBE_ADAPTERS = AskChannel(
    "fleet.adapters", AskAdapters, Delivery.ASK, (Party.LAUNCHER,), (Party.ORCHESTRATOR,), answer=Adapters
)
WANTED_ADAPTERS = Channel(
    "adapters.{key}", WantedAdapter, Delivery.KEY_VALUE, (Party.ORCHESTRATOR,), (Party.ORCHESTRATOR,)
)
# Only an orchestrator's key can make a worker change its weights.
ORDER_WEIGHTS = AskChannel(
    "fleet.order_weights",
    OrderWeights,
    Delivery.ASK,
    (Party.LAUNCHER, *ROUTERS),
    (Party.ORCHESTRATOR,),
    answer=WeightsOrdered,
)
CHANGE_WEIGHTS = AskChannel(
    "worker.{worker_id}.weights", ChangeWeights, Delivery.ASK, (Party.ORCHESTRATOR,), WORKERS, answer=WeightsChanged
)
DESCRIBE_WEIGHTS = AskChannel(
    "fleet.weights", AskWeights, Delivery.ASK, (Party.LAUNCHER, *ROUTERS), (Party.ORCHESTRATOR,), answer=Weights
)
WANTED_WEIGHTS = Channel(
    "weights.{key}", WantedWeights, Delivery.KEY_VALUE, (Party.ORCHESTRATOR,), (Party.ORCHESTRATOR, *WORKERS)
)
WAKE_MODEL = AskChannel("fleet.wake", WakeModel, Delivery.ASK, ROUTERS, (Party.ORCHESTRATOR,), answer=ModelWaking)
ORDER_MODEL = AskChannel(
    "fleet.sleep", OrderModel, Delivery.ASK, (Party.LAUNCHER,), (Party.ORCHESTRATOR,), answer=ModelOrdered
)
SLEEP = AskChannel(
    "worker.{worker_id}.sleep", SleepWorker, Delivery.ASK, (Party.ORCHESTRATOR,), WORKERS, answer=OrderTaken
)
WAKE = AskChannel(
    "worker.{worker_id}.wake", WakeWorker, Delivery.ASK, (Party.ORCHESTRATOR,), WORKERS, answer=OrderTaken
)

PLAN = Channel("fleet.plan", PlanDecision, Delivery.EVENT, (Party.ORCHESTRATOR,), (Party.COLLECTOR,))
PLANS = AskChannel("fleet.plans", AskPlans, Delivery.ASK, (Party.LAUNCHER,), (Party.ORCHESTRATOR,), answer=Plans)
SCALE = AskChannel(
    "fleet.scale", ScaleFleet, Delivery.ASK, (Party.ORCHESTRATOR,), (Party.LAUNCHER,), answer=FleetScaled
)
DISAGGREGATION_REPORT = AskChannel(
    "fleet.disaggregation_report",
    AskDisaggregationReport,
    Delivery.ASK,
    (Party.LAUNCHER,),
    (Party.COLLECTOR,),
    answer=DisaggregationReport,
)

REQUESTS_FINISHED = Channel(
    "request.{router_id}.finished", RequestsFinished, Delivery.EVENT, ROUTERS, (Party.COLLECTOR, Party.ORCHESTRATOR)
)
REPORT_USAGE = AskChannel(
    "router.{router_id}.usage",
    ReportUsage,
    Delivery.ASK,
    ROUTERS,
    (Party.COLLECTOR,),
    answer=UsageStored,
    sent_by="router_id",
)
# Routers read the ledger for the budgets of their keys.
USAGE = Channel(
    "usage.{entry}", UsageMonth, Delivery.KEY_VALUE, (Party.COLLECTOR,), (Party.ROUTER, Party.COLLECTOR, Party.LAUNCHER)
)
# Prompts and answers of all tenants: no other party may read them.
RESPONSES = Channel("responses.{key}", ResponsePart, Delivery.KEY_VALUE, ROUTERS, ROUTERS)
RESPONSE_RUNS = AskChannel(
    "router.{router_id}.response", AskResponse, Delivery.ASK, ROUTERS, ROUTERS, answer=ResponseRuns
)
# Prompts and answers of all tenants, too.
FILE_PARTS = Channel("file_parts.{key}", FilePart, Delivery.KEY_VALUE, ROUTERS, ROUTERS)
FILES = Channel("files.{key}", StoredFile, Delivery.KEY_VALUE, ROUTERS, ROUTERS)
# The console shows how far batches are; their lines and results are in the files.
BATCHES = Channel("batches.{key}", StoredBatch, Delivery.KEY_VALUE, ROUTERS, (Party.ROUTER, Party.COLLECTOR))
SERVICE_STATUS = Channel(
    "service.{service}.{instance}",
    ServiceStatus,
    Delivery.EVENT,
    (Party.ROUTER, Party.ORCHESTRATOR, Party.COLLECTOR, Party.WORKER),
    # Services receive it too: a health check uses the key of the service that it checks.
    (*EVERYONE, *WORKERS),
)

DEFAULT_MODE = Channel(
    "routing.{scope}", DefaultMode, Delivery.KEY_VALUE, (Party.COLLECTOR,), (Party.ROUTER, Party.COLLECTOR)
)

LEADERSHIP = Channel("leaders.{role}", Leadership, Delivery.KEY_VALUE, (Party.ORCHESTRATOR,), (Party.ORCHESTRATOR,))

CHANNELS: dict[str, Channel[Any]] = {name: row for name, row in list(globals().items()) if isinstance(row, Channel)}

KEY_VALUE_CHANNELS = [row for row in CHANNELS.values() if row.delivery is Delivery.KEY_VALUE]
"""A row's values are in a bucket. A value is written to ``$KV.{bucket}.{key}``; when JetStream has stored it, the
server itself publishes it again on ``stored.{bucket}.{key}``, to which no party may publish.
"""


def bucket_of(channel: Channel[Any]) -> str:
    """The bucket of a KEY_VALUE channel."""
    return channel.subject.partition(".")[0]


def key_of(address: str) -> str:
    """The key in an address or filter of a KEY_VALUE channel."""
    return address.partition(".")[2]


def stream_of(bucket: str) -> str:
    """The name of the bucket's JetStream stream."""
    return f"KV_{bucket}"


def written_subject(bucket: str, key: str) -> str:
    """Where the key's values are published, to be stored."""
    return f"$KV.{bucket}.{key}"


def stored_subject(bucket: str, key: str) -> str:
    """Where the server publishes what it has stored under the key."""
    return f"stored.{bucket}.{key}"


def api_subject(verb: str, bucket: str) -> str:
    """JetStream's API for the bucket's stream: ``verb`` is STREAM.INFO, for example."""
    return f"$JS.API.{verb}.{stream_of(bucket)}"
