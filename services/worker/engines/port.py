"""The engine port: an ASGI app, KV events, load, the KV exchange, and the engine's end.

The worker calls the app once per leg, with the body that ``legs.body`` made for the leg's kind. What HTTP cannot carry
(orders about KV, cached-token counts, timings, token ids) goes through ``CURRENT_LEG``, which the worker sets before it
calls the app: the engine reads the leg's ``LegInput`` and fills its ``LegResult``. For a PREFILL leg the engine
generates one token, whatever the body asks for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID

import msgspec

from connector.messages import EngineCall, EngineNotification
from services.worker.settings import Settings
from shared.contracts.failures import Failure
from shared.contracts.fleet_orders import PauseMode, WeightsAction
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import LegKind
from shared.contracts.kv_events import KvEvent
from shared.contracts.kv_exchange import KvTransferReport, LegOrder
from shared.contracts.load import NO_STEP_TOTALS, StepTotals, StoreState
from shared.contracts.workers import Fingerprint, HashScheme, LoraAdapter
from shared.runtime.service import WrongConfiguration
from shared.runtime.settings import CommonSettings

Scope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
AsgiApp = Callable[
    [Scope, Callable[[], Awaitable[AsgiMessage]], Callable[[AsgiMessage], Awaitable[None]]], Awaitable[None]
]


class EngineDead(Exception):
    """The engine is gone for good; the worker process must end."""


class EngineRefused(WrongConfiguration):
    """The engine cannot serve; the message says why and what to do. Another start has the same result."""


class ProfilerFailed(Exception):
    """The engine's profiler did not start or stop; the message says why."""


class LegFailed(Exception):
    """The engine's app cannot serve this leg, or not to its end; ``failure`` is what the router gets."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True, slots=True, kw_only=True)
class LegInput:
    """What the engine is given with a leg beside the body."""

    kind: LegKind = LegKind.AGGREGATED
    request_id: str = ""
    path: str = ""
    trace_headers: dict[str, str] = field(default_factory=dict)
    prefill_cached_tokens: int = 0
    """DECODE: cached tokens of the prefill leg, for the client's usage, unless ``kv_transfer_params`` carry them."""
    expected_tokens: int = -1
    """Prompt tokens that placement expects this engine to compute; -1: not known."""
    cache_salt: str = ""
    """Salt of the tenant, which the engine hashes into the names of cached media; the body has it as well."""
    media_salt: str = ""
    """Salt of the names that the client itself gives to its media; empty: none."""
    order: LegOrder | None = None
    """What to do about KV, for engines with an exchange."""
    rendered: asyncio.Future[Any] | None = None
    """Where the engine puts its own form of the request, instead of computing it; None for a leg."""
    resume: list[int] | None = None
    """Tokens that the client has received from a leg that broke off. The engine continues after them. Its server gets
    them first, and the worker drops what the server sends for them. None: start at the beginning."""
    resume_joined: frozenset[int] = frozenset()
    """Indices of the resumed tokens that the server must get together with the token before."""
    resume_cached_tokens: int | None = None
    """Cached tokens of a resumed prompt as usage counts them: what the first engine found. None: not known."""
    answer_id: str = ""
    """Seed of the ids that the server draws for the answer; empty: they are random."""


@dataclass(slots=True, kw_only=True)
class LegResult:
    """What the engine fills in while it serves a leg. Instants are on the monotonic clock."""

    on_shown: Callable[[], Awaitable[None]] | None = None
    """Called by the engine when the server has sent all events about the outputs so far, and asks for the next."""
    caught_up: bool = True
    """Whether the server's output is new to the client; a leg that resumes begins with False."""
    cannot_resume: str = ""
    """Why the engine cannot continue after the resumed tokens."""
    prompts_computing: int = 0
    """Prompts, or inputs, that the engine has and has generated nothing for yet."""
    sequences: int = 0
    """Sequences that the engine is generating for this leg."""
    is_over: bool = False
    """Every token was generated and passed to the server. The worker sends later output with the leg's end."""
    prompt_tokens: int = 0
    """Tokens of the client's prompt. Resumed tokens count as completion."""
    cached_tokens: int = 0
    """Prompt tokens found in this engine's own prefix cache."""
    usage_cached_tokens: int | None = None
    """Cached prompt tokens as usage counts them, from the first token on until the worker takes them."""
    received_tokens: int = 0
    """Prompt tokens whose KV came from another engine."""
    received_bytes: int = 0
    completion_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    """Tokens that were generated and are not in a frame yet: the worker takes them when it sends data."""
    joined: list[int] = field(default_factory=list)
    """Indices in ``token_ids`` of those that the server got together with the token before."""
    ids_drawn: int = 0
    kv_transfer: bytes = b""
    """PREFILL: JSON of the ``kv_transfer_params`` that a decode engine needs; for engines without an exchange."""
    transfer_report: KvTransferReport | None = None
    """Where the prompt's KV came from, from engines with an exchange; for several prompts, the sum."""
    transfer_reports: dict[str, KvTransferReport] = field(default_factory=dict)
    """The newest report of each prompt, by the engine's request id."""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    first_token_at: float = 0.0
    finish_reason: str = ""

    def sequence_began(self) -> None:
        """The engine begins to generate one more sequence."""
        self.sequences += 1
        self.is_over = False

    def sequence_ended(self) -> None:
        self.sequences -= 1
        self.is_over = self.sequences == 0

    def add_tokens(self, token_ids: Sequence[int], *, last: bool) -> None:
        """The server gets these together. After the ``last`` ones no leg resumes, so they need no marks."""
        if not last and len(token_ids) > 1:
            sent = len(self.token_ids)
            self.joined.extend(range(sent + 1, sent + len(token_ids)))
        self.token_ids.extend(token_ids)
        self.completion_tokens += len(token_ids)

    def take_tokens(self) -> tuple[list[int], list[int] | None]:
        """For the next frame: the tokens, and the indices of those joined with the token before."""
        token_ids, self.token_ids = self.token_ids, []
        if not self.joined:
            return token_ids, None
        joined, self.joined = self.joined, []
        return token_ids, joined

    def take_cached(self) -> int | None:
        """For the next frame: cached prompt tokens as usage counts them, once."""
        found, self.usage_cached_tokens = self.usage_cached_tokens, None
        return found

    async def shown(self) -> None:
        """The server has sent all events about the outputs so far."""
        if self.on_shown is not None:
            await self.on_shown()

    @property
    def is_new_to_client(self) -> bool:
        """Whether the server's output now is valid and new to the client."""
        return self.caught_up and not self.cannot_resume


@dataclass(frozen=True, slots=True)
class Leg:
    """One call of the engine's app."""

    input: LegInput
    result: LegResult = field(default_factory=LegResult)

    def draw_id(self) -> UUID:
        """The next id that the server needs. The same server draws the same ids for the same tokens."""
        self.result.ids_drawn += 1
        drawn = f"{self.input.answer_id}:{self.result.ids_drawn}".encode()
        return UUID(bytes=blake2b(drawn, digest_size=16).digest())


CURRENT_LEG: ContextVar[Leg | None] = ContextVar("CURRENT_LEG", default=None)


@dataclass(frozen=True, slots=True)
class Identity:
    """One process of one worker."""

    worker_id: WorkerId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What does not change while the engine lives."""

    engine: str
    models: list[str]
    max_model_len: int
    fingerprint: Fingerprint
    hashing: HashScheme
    kv_tokens: int
    """Capacity of the KV cache."""
    legs_max: int
    step_tokens_max: int = 2048
    """Tokens computed in one step."""
    prefix_caching: bool = True
    renders: bool = False
    scores_tokens: bool = True
    """Whether it gives log probabilities of tokens that a request names (``logprob_token_ids``)."""
    attached: bool = False
    """See ``WorkerRecord.attached``."""
    adapters_at_once_max: int = 0
    """Different LoRA adapters in one batch; 0: the engine takes none."""
    paths: frozenset[str] = frozenset()
    """Paths of ``engine_paths.SERVED`` that the engine's server has; empty: unknown."""
    note: str = ""
    """Remark for operators."""
    kv_token_bytes: int = 0
    """See ``WorkerRecord.kv_token_bytes``."""
    kv_boundary_bytes: int = 0
    """See ``WorkerRecord.kv_boundary_bytes``."""


class EngineLoad(msgspec.Struct, kw_only=True):
    """The engine's state now and totals since its start; see ``LoadReport`` for units."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_tokens_used: int = 0
    prompt_tokens_total: int = 0
    computed_tokens_total: int = 0
    cached_tokens_total: int = 0
    received_tokens_total: int = 0
    received_bytes_total: int = 0
    received_seconds_total: float = 0.0
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_s_per_token: float = 0.0
    steps: StepTotals | None = None
    prompt_steps: StepTotals = NO_STEP_TOTALS
    """The part of ``steps`` that computed prompts, as far as the engine tells it apart."""
    store: StoreState | None = None
    adapters_running: list[str] = []
    adapters_waiting: list[str] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """The engine's tokenizer, for routers (see ``TokenizerAsset``)."""

    tokenizer_json: bytes
    chat_template: str
    special_tokens: dict[str, str]
    adds_special_tokens: bool
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTokens:
    """A request as the engine sees it (see ``PromptTokens``)."""

    tokens: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    """Hashes of the full blocks, 64 bits each."""
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePrompt:
    """A request as the engine would get it (see ``RenderedPrompt``)."""

    tokens: int = 0
    hashes: list[bytes] = field(default_factory=list)
    """Full hashes of the full blocks."""
    media_end: int = 0
    refusal: str = ""


class EngineRenderer(Protocol):
    """Renders requests as for a leg, and computes nothing."""

    async def render(self, path: str, body: bytes, *, cache_salt: str, media_salt: str) -> EnginePrompt:
        """``body`` as the engine's server would get it for a leg with these salts (see ``LegInput``). Cancelled, it
        ends when the engine's server has. Raises what that raises.
        """


class EngineExchange(Protocol):
    nixl_package: str
    """The package by which it loads peers' NIXL metadata; empty: it loads none."""

    async def call(self, call: EngineCall) -> EngineNotification:
        """Run the call between two engine steps. Later results come as notifications. Raises EngineDead."""

    def on_notifications(self, listener: Callable[[EngineNotification], None]) -> None:
        """Call ``listener`` on the event loop with each notification that is no call's response."""


class EngineProfiler(Protocol):
    name: str
    """Profiler and engine, for operators."""

    async def start(self, profile_id: str, steps_max: int) -> None:
        """Record until ``stop``, at most so many steps; what an earlier profile wrote is deleted. Raises
        ProfilerFailed.
        """

    async def stop(self) -> list[Path]:
        """End the recording, and return the traces that were written: Chrome's JSON, not compressed, with the times of
        the wall clock. Raises ProfilerFailed.
        """


class EngineAdapters(Protocol):
    @property
    def loaded(self) -> list[LoraAdapter]:
        """Those that requests may name now."""

    async def load(self, name: str, source: Path, within: Path | None = None) -> LoraAdapter:
        """Load the adapter in the folder ``source``, or replace the one of this name; requests that run go on with what
        they began with. ``within``: see ``adapters.copy_adapter``. Raises AdapterRefused, EngineDead.
        """

    async def unload(self, name: str) -> None:
        """Requests that run may end. Raises AdapterRefused, EngineDead."""


class WeightsRefused(Exception):
    """A call about weights failed; the message says why."""


@dataclass(frozen=True, slots=True)
class NamedWeights:
    """What an engine's registry entry says after a change of its weights."""

    fingerprint: Fingerprint
    hashing: HashScheme


class EngineWeights(Protocol):
    """Weights that can be changed in place. All calls raise WeightsRefused, EngineDead."""

    paused: bool

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Schedule nothing from now on. Returns when no request is being computed."""

    async def resume(self) -> None:
        """Go on, also where nothing is paused."""

    async def begin(self) -> None:
        """Weights will be written: no KV from now on is found by any request, until ``name``."""

    async def load(self, folder: Path) -> None:
        """Load a checkpoint of the model. After a failure the weights may be neither the old nor the new ones."""

    async def transfer(self, action: WeightsAction, payload: dict[str, Any]) -> None:
        """A call of the engine's weight transfer."""

    async def name(self, weights: str, version: str) -> NamedWeights:
        """The weights are complete: see ``Fingerprint.weights``. ``version``: as clients see it."""


class EngineHealth(Protocol):
    """State of an engine that may be away for a while and come back."""

    @property
    def fault(self) -> str:
        """Why it cannot serve now; empty while it can."""

    def on_changed(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` on the event loop when ``fault`` has changed."""


class Engine(Protocol):
    """One running engine. Engines inherit this; what they do not have remains None."""

    facts: EngineFacts
    app: AsgiApp
    """The OpenAI-compatible server. Cancelling a call aborts the request in the engine."""
    exchange: EngineExchange | None = None
    """None if the engine's connector moves KV in its own way, or not at all."""
    adapters: EngineAdapters | None = None
    """None if the engine was started without LoRA."""
    renderer: EngineRenderer | None = None
    """None if the engine cannot render prompts without computing them."""
    profiler: EngineProfiler | None = None
    """None if the engine has none that a worker could start."""
    weights: EngineWeights | None = None
    """None if its weights cannot be changed while it runs."""
    health: EngineHealth | None = None
    """None for an engine that serves as long as it lives."""

    def load(self) -> EngineLoad:
        """Now. Cheap: called at most ``LOAD_HZ_MAX`` times a second."""

    def on_load_changed(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` on the event loop when the load may have changed."""

    def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        """Changes of the prefix cache in order, from the first on. One consumer. Raises EngineDead."""

    def tokenizer_files(self) -> TokenizerFiles:
        """The engine's tokenizer. May read files: call it off the event loop."""

    async def tokens(self, path: str, body: bytes) -> EngineTokens:
        """The engine's own tokens and block hashes for this request; nothing is generated."""

    async def dead(self) -> str:
        """Wait until the engine has died; returns the reason."""

    async def close(self, deadline_s: float) -> None:
        """End the engine and all its processes."""


class StartEngine(Protocol):
    def __call__(
        self, settings: Settings, common: CommonSettings, report: Callable[[str], None], *, identity: Identity
    ) -> Awaitable[Engine]:
        """``report`` gets the progress of the start. Raises whatever the engine raises."""


KV_EVENTS_MAX = 10_000
"""Events queued for the consumer; when there are more, it gets the whole cache again."""


class KvEventFeed:
    """KV events of an engine that has ``died`` when that future is done. Must be made on a running event loop."""

    def __init__(self, died: asyncio.Future[str], whole_as_events: Callable[[], list[KvEvent]]) -> None:
        self._died = died
        self._whole_as_events = whole_as_events
        self._events: list[KvEvent] = []
        self._arrived = asyncio.Event()
        died.add_done_callback(lambda _died: self._arrived.set())

    def tell(self, events: Sequence[KvEvent]) -> None:
        """Queue new events, which ``whole_as_events`` already includes."""
        if not events:
            return
        self._events += events
        if len(self._events) > KV_EVENTS_MAX:
            self._events = self._whole_as_events()
        self._arrived.set()

    async def batches(self) -> AsyncIterator[list[KvEvent]]:
        """All that came since the last batch, from the first event on. Raises EngineDead."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            if self._died.done():
                raise EngineDead(self._died.result())
            events, self._events = self._events, []
            yield events
