"""What a worker needs of an engine: an ASGI app, an event source, a load source, a way to end.

The worker shell calls the app once per leg, with the body that ``core.leg_body`` made for the leg's kind. What does not
fit through HTTP (what to do about KV, true cached-token counts, timings, token ids) goes through ``CURRENT_LEG``:
the shell sets a fresh ``LegRecord`` in the context before it calls the app, the engine reads and fills it. Of a PREFILL
leg the engine makes one token, whatever the body asks for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from connector.messages import EngineCall, EngineNotification
from services.worker.settings import Settings
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import LegKind
from shared.contracts.kv_events import KvEvent
from shared.contracts.kv_exchange import KvTransferReport, LegOrder
from shared.contracts.load import StepTotals, StoreState
from shared.contracts.workers import Fingerprint, HashScheme
from shared.runtime.settings import CommonSettings

Scope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
AsgiApp = Callable[
    [Scope, Callable[[], Awaitable[AsgiMessage]], Callable[[AsgiMessage], Awaitable[None]]], Awaitable[None]
]


class EngineDead(Exception):
    """The engine is gone for good; the worker process must end."""


@dataclass(slots=True)
class LegRecord:
    """One leg, as the shell and the engine share it while it runs. Seconds are on the monotonic clock."""

    kind: LegKind
    request_id: str
    trace_headers: dict[str, str]
    path: str = ""
    """Of the request."""
    prefill_cached_tokens: int = 0
    """DECODE: what the prefill leg had cached: the request's cached tokens, unless ``kv_transfer_params`` tell them."""
    expected_tokens: int = -1
    """Prompt tokens that placement expects this engine to compute; -1: not known."""
    order: LegOrder | None = None
    """What to do about KV, for engines with an exchange."""
    resume: list[int] | None = None
    """Tokens of the answer that the client has had from a leg that broke off. The engine goes on behind them; its
    server hears of them first, and what it says of them is thrown away. None: from the beginning."""
    resume_joined: frozenset[int] = frozenset()
    """Which of them, by index, its server shall hear of together with the one before."""
    # The engine fills in:
    caught_up: bool = False
    """With ``resume``: what the server says from now on is new to the client."""
    cannot_resume: str = ""
    """Why the engine will not go on behind these tokens."""
    sequences: int = 0
    """Being generated for it now."""
    is_over: bool = False
    """Every token has been generated and told: what the server still says, the shell sends with the leg's end."""
    prompt_tokens: int = 0
    """Of the client's prompt: resumed tokens are tokens of the completion."""
    cached_tokens: int = 0
    """Prompt tokens found in this engine's own prefix cache."""
    received_tokens: int = 0
    """Prompt tokens whose KV came from another engine."""
    received_bytes: int = 0
    completion_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    """Generated and not yet put into a frame: the shell takes them when it sends data."""
    joined: list[int] = field(default_factory=list)
    """Which of ``token_ids``, by index, the server has heard of together with the one before."""
    kv_transfer: bytes = b""
    """PREFILL: JSON of the ``kv_transfer_params`` that a decode engine needs; for engines without an exchange."""
    transfer_report: KvTransferReport | None = None
    """Where the prompt's KV came from, of engines with an exchange; of several prompts, of all together."""
    transfer_reports: dict[str, KvTransferReport] = field(default_factory=dict)
    """The newest of each prompt, by the engine's own name for it."""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    first_token_at: float = 0.0
    finish_reason: str = ""

    def sequence_began(self) -> None:
        """One more is being generated."""
        self.sequences += 1
        self.is_over = False

    def sequence_ended(self) -> None:
        """One of them will say no more."""
        self.sequences -= 1
        self.is_over = self.sequences == 0

    def heard(self, token_ids: Sequence[int], *, last: bool) -> None:
        """The server hears of these at once; of the ``last`` ones nobody needs to know that."""
        if not last and len(token_ids) > 1:
            said = len(self.token_ids)
            self.joined.extend(range(said + 1, said + len(token_ids)))
        self.token_ids.extend(token_ids)
        self.completion_tokens += len(token_ids)

    def take_tokens(self) -> tuple[list[int], list[int] | None]:
        """For the next frame: the tokens, and which of them were heard of together with the one before."""
        token_ids, self.token_ids = self.token_ids, []
        if not self.joined:
            return token_ids, None
        joined, self.joined = self.joined, []
        return token_ids, joined

    @property
    def sends_notifications(self) -> bool:
        """Whether what the server says now is new to the client, and right."""
        return self.resume is None or (self.caught_up and not self.cannot_resume)


CURRENT_LEG: ContextVar[LegRecord | None] = ContextVar("CURRENT_LEG", default=None)


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose engine it is: one life of one worker."""

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
    kv_blocks: int
    legs_max: int
    step_tokens_max: int = 2048
    """Tokens computed in one step."""
    prefix_caching: bool = True
    note: str = ""
    """What else a person may want to know of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The engine's state now and its totals since it started; see ``LoadReport`` for units."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_blocks_used: int = 0
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
    store: StoreState | None = None


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
    """Of the full blocks, 64 bits each."""
    refusal: str = ""
    """Why the engine would not tokenize it."""


class EngineExchange(Protocol):
    """The engine's end of the KV exchange."""

    async def call(self, call: EngineCall) -> EngineNotification:
        """Run the call between two engine steps; later results come as notifications. Raises EngineDead."""

    def on_notifications(self, listener: Callable[[EngineNotification], None]) -> None:
        """Call ``listener`` (on the event loop) with what the engine says without being asked."""


class Engine(Protocol):
    """One running engine. Usable when its factory returns."""

    @property
    def facts(self) -> EngineFacts:
        """What does not change."""

    @property
    def app(self) -> AsgiApp:
        """The OpenAI-compatible server. Cancelling a call aborts the request in the engine."""

    @property
    def exchange(self) -> EngineExchange | None:
        """Its end of the KV exchange; None: its connector moves KV in its own way, or not at all."""

    def load(self) -> EngineLoad:
        """Now. Cheap: called at most ``LOAD_HZ_MAX`` times a second."""

    def on_load_changed(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` (on the event loop) when the load may have changed."""

    def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        """Changes of the prefix cache, in order, from the first on. One consumer. Raises EngineDead."""

    def tokenizer_files(self) -> TokenizerFiles:
        """How text becomes tokens here. May read files: call it off the event loop."""

    async def tokens(self, path: str, body: bytes) -> EngineTokens:
        """How the engine itself tokenizes this request and names its blocks; nothing is generated."""

    async def dead(self) -> str:
        """Return, with the reason in words, when the engine has died; wait for ever otherwise."""

    async def close(self, deadline_s: float) -> None:
        """End the engine and everything it started."""


class StartEngine(Protocol):
    """A kind of engine."""

    def __call__(
        self, settings: Settings, common: CommonSettings, say: Callable[[str], None], *, identity: Identity
    ) -> Awaitable[Engine]:
        """Start one; ``say`` is told where it is. Raises whatever the engine does not like."""
