"""Legs: the part of a request that a router sends to a worker, and the frames of the worker's response.

A leg begins with ``StartLeg`` on the worker's subject. The worker responds on the router's frame subject with one HEAD
frame, DATA frames and then exactly one END or FAILURE frame, numbered from 0. An END frame may also be the last DATA
frame, or the whole response: then it has their fields, too. Frames of many legs travel in one ``FrameBatch``, so that
the cost per message does not grow with the number of streams.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import IntEnum, StrEnum

import msgspec

from shared.contracts.decisions import TtftParts
from shared.contracts.failures import Failure
from shared.contracts.ids import DecisionId, Epoch, LegId, RequestId, RouterId, WorkerId
from shared.contracts.kv_exchange import KvSource, KvTransferReport
from shared.contracts.message import Message, PackedMessage


class LegKind(StrEnum):
    """The part of a request that a leg runs."""

    AGGREGATED = "aggregated"
    """Prefill and decode on this worker."""
    PREFILL = "prefill"
    """Computes the prompt's KV and samples the answer's first token, which goes to the decode worker's engine with the
    last grant of the KV, or with the offer in this leg's report.
    """
    DECODE = "decode"
    """Generates the completion from the KV that ``StartLeg.kv_transfer`` describes."""


class StartLeg(Message, frozen=True, kw_only=True):
    """Router -> worker: run this leg. ``body`` is the client's body, byte for byte."""

    worker_id: WorkerId
    router_id: RouterId
    request_id: RequestId
    leg_id: LegId
    kind: LegKind
    path: str
    """HTTP path, such as ``/v1/chat/completions``."""
    body: bytes
    content_type: str = "application/json"
    epoch: Epoch | None = None
    """Epoch of the worker that placement chose; a worker of another epoch refuses the leg."""
    deadline_s: float
    """Seconds after which the worker fails the leg with DEADLINE, unless it has begun to answer with a stream."""
    kv_transfer: bytes = b""
    """DECODE: ``LegReport.kv_transfer`` of the prefill leg, opaque to the router (JSON of ``kv_transfer_params``)."""
    prefill_cached_tokens: int = 0
    """DECODE: prompt tokens that the prefill leg had cached, for the usage numbers."""
    kv_offer: bool = True
    """PREFILL: whether to lease the blocks at the end; False when the decode leg follows the prefill."""
    kv_sources: list[KvSource] = msgspec.field(default_factory=list)
    """Workers that probably hold more of the prompt than this worker does."""
    expected_tokens: int = -1
    """Prompt tokens that placement expects this worker to compute; -1: unknown. The worker reports them as waiting."""
    cache_hit_threshold: float | None = None
    """The worker refuses the leg if a smaller share of its prompt is cached or can be fetched. None: its default counts
    (``WorkerRecord.cache_hit_threshold``), and the router places a request that is refused by that again. Ignored for
    prefill legs.
    """
    kv_fetch_min_tokens: int | None = None
    """Minimum that the client chose; None: the worker's default."""
    itl_target_s: float = 0.0
    """Target for the time between tokens; 0: none."""
    resume: bytes | None = None
    """Token ids that the client already received from a failed leg, packed (see ``pack_tokens``). The engine continues
    after them, and the response contains only later tokens. None: start from the beginning.
    """
    resume_joined: bytes = b""
    """Indexes of those tokens of ``resume`` that the first engine delivered together with the previous token, packed
    (see ``Frame.joined``).
    """
    cached_tokens: int | None = None
    """Cached prompt tokens as the usage of the first leg would have counted them (see ``Frame``); for a leg with
    ``resume``."""
    created: int = 0
    """Time ``created`` or ``created_at`` of the response's events (Unix seconds), for a leg with ``resume``; 0:
    unknown."""
    answer_id: str = ""
    """The ids of the response's parts are derived from it, so that a resumed stream keeps those of its first leg.
    Random, the same for all legs of a request; empty: the engine's ids are random.
    """
    cache_salt: str = ""
    """Replaces ``cache_salt`` of the body. It is derived from that and the tenant, so that only requests of one tenant
    share cached KV. Empty: keep the body's.
    """
    media_salt: str = ""
    """Hashed into the names (``uuid``) that the client gives to its media, so that only requests of its tenant find
    media under them. Empty: ``cache_salt`` is.
    """
    sequences: int = 1
    """Completions or inputs that the engine computes for the leg, which counts as this number of legs."""


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as 32-bit integers, little-endian on every machine that vLLM runs on."""
    return array("I", tokens).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """The ids in ``packed``. Raises ValueError when its length is no multiple of 4."""
    return array("I", packed).tolist()


class CancelLeg(Message, frozen=True, kw_only=True):
    """Router -> worker: abort this leg and send no more frames of it."""

    worker_id: WorkerId
    leg_id: LegId


CACHE_THRESHOLD = "cache_threshold"
"""Finish reason of a leg that was refused because its cache hit threshold was not met."""


class LegReport(Message, frozen=True, kw_only=True):
    """Worker -> router, in the END frame: tokens and times of the leg. Times are seconds on the worker's clock."""

    prompt_tokens: int = 0
    """Tokens of the client's prompt. Resumed tokens (``StartLeg.resume``) count only in ``kv.prompt_tokens``."""
    cached_tokens: int = 0
    """Prompt tokens found in this worker's own prefix cache."""
    received_tokens: int = 0
    """Prompt tokens whose KV came from another worker."""
    completion_tokens: int = 0
    """Tokens of the whole response, including resumed ones."""
    received_bytes: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    """Time from the first scheduling to the first token."""
    first_token_s: float = 0.0
    """Time from the leg's arrival at the worker to its first token."""
    total_s: float = 0.0
    kv_transfer: bytes = b""
    """PREFILL: what a decode worker needs to read the KV (JSON of ``kv_transfer_params``)."""
    finish_reason: str = ""
    kv: KvTransferReport | None = None
    """Where the prompt's KV came from; None when the engine's connector does not report it."""


class FrameKind(IntEnum):
    HEAD = 0
    DATA = 1
    END = 2
    """May also have the fields of the DATA frame before it, and of the HEAD: then it takes their place."""
    FAILURE = 3


class Frame(PackedMessage, frozen=True, kw_only=True):
    """One piece of a leg's response."""

    leg_id: LegId
    seq: int
    """0 for the HEAD, then consecutive; a gap means that frames were lost."""
    kind: FrameKind
    data: bytes = b""
    """DATA: bytes for the client (for streams: whole SSE events). Empty: the engine has generated tokens of a stream of
    which its server says nothing yet.
    """
    token_ids: list[int] = msgspec.field(default_factory=list)
    """DATA: token ids contained in ``data``."""
    status: int = 0
    """HEAD: the HTTP status."""
    content_type: str = ""
    report: LegReport | None = None
    failure: Failure | None = None
    joined: list[int] | None = None
    """DATA: indexes of those ``token_ids`` that the engine delivered together with the previous token. The output of
    vLLM's tool parsers can depend on this grouping, so a resuming worker replays the tokens in the same groups.
    """
    cached_tokens: int | None = None
    """DATA, the first that comes with or after a token: cached prompt tokens as the response's usage will count them.
    """


class FrameBatch(PackedMessage, frozen=True, kw_only=True):
    """Worker -> router: the frames of one iteration of the worker's loop, of any number of this router's legs."""

    router_id: RouterId
    worker_id: WorkerId
    epoch: Epoch
    frames: list[Frame]
    in_flight: list[LegId] | None = None
    """Sent at intervals: all legs of this router that the worker serves after these frames. A leg that only one side
    knows is orphaned.
    """


KV_MOVES_MAX = 8
"""Maximum length of ``RequestFinished.kv_moves``."""


class KvMoved(Message, frozen=True, kw_only=True):
    """KV that one worker read from another for a request."""

    source_id: WorkerId
    reader_id: WorkerId
    tokens: int = 0
    bytes: int = 0


class RequestFinished(Message, frozen=True, kw_only=True):
    """A finished request as its router measured it, for metrics. Times in seconds; -1: unknown."""

    request_id: RequestId
    model: str
    path: str
    mode: str
    """aggregated, disaggregated or decode_first."""
    status: int
    decision_id: DecisionId = DecisionId("")
    """The last placement."""
    trace_id: str = ""
    """Trace id, 32 hexadecimal digits; empty without a recorded trace."""
    tenant: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    reason: str = ""
    """Empty, or the ``Reason`` for which it failed."""
    attempts: int = 1
    resumes: int = 0
    """How often its stream was resumed on another worker."""
    resumed_tokens: int = 0
    """Tokens that the client had already received when its stream was resumed, summed over all resumes."""
    prompt_tokens: int = -1
    completion_tokens: int = -1
    cached_tokens: int = -1
    received_tokens: int = -1
    received_bytes: int = 0
    predicted_cached_tokens: int = -1
    ttft_s: float = -1.0
    e2e_s: float = -1.0
    itl_s: float = -1.0
    """Mean time between tokens after the first."""
    placement_s: float = -1.0
    ttft_parts: TtftParts | None = None
    """The parts of the time to the first token; None without a first token."""
    prefill_s: float = -1.0
    streamed_handoff: bool = False
    """Whether the decode leg read the KV while the prefill was running."""
    recomputed_tokens: int = -1
    """Prompt tokens that the decode worker of a disaggregated request computed again."""
    reprefilled_tokens: int = -1
    """Tokens computed again after preemptions."""
    recompute_slowed_s: float = -1.0
    """Time in which the answering worker slowed what it computed again, to spare ready requests."""
    drafted_tokens: int = 0
    """Tokens of the answer that the answering worker's drafter proposed (speculative decoding)."""
    accepted_tokens: int = 0
    """Drafted tokens that the model agreed with."""
    readback_tokens: int = -1
    """Prompt tokens that the prefill worker fetched from other workers."""
    kv_wait_s: float = -1.0
    """Time from the first lease request to the first grant."""
    kv_read_s: float = -1.0
    kv_moves: list[KvMoved] = msgspec.field(default_factory=list)
    """KV that its workers read, as far as they report it; at most ``KV_MOVES_MAX`` entries."""
    ttft_target_s: float = -1.0
    """Latency target of the request; -1: none. Likewise ``itl_target_s``."""
    itl_target_s: float = -1.0
    is_batch: bool = False
    """A line of a batch: no user waits for it, so its times count in no latency."""


class RequestsFinished(Message, frozen=True, kw_only=True):
    """Router -> metrics collector: requests that finished since the last such message."""

    router_id: RouterId
    requests: list[RequestFinished]


RENDERED_BODY_BYTES_MAX = 8 * 1024 * 1024
"""Larger bodies are not rendered for routers: their requests are placed by load alone."""
RENDER_S_MAX = 1.0
"""Until the router has the result, waiting for earlier prompts included."""


class RenderPrompt(Message, frozen=True, kw_only=True):
    """Router -> worker: asks how its engine would read this request. Nothing is computed."""

    worker_id: WorkerId
    path: str
    body: bytes
    """The client's; likewise the salts, as in ``StartLeg``."""
    cache_salt: str = ""
    media_salt: str = ""


class RenderedPrompt(Message, frozen=True, kw_only=True):
    """Worker -> router: the prompt as the engine would get it."""

    worker_id: WorkerId
    epoch: Epoch
    tokens: int = 0
    """Tokens of the prompt, placeholders of media included."""
    hashes: bytes = b""
    """Hashes of the prompt's full blocks, packed (see ``kv_events.pack_hashes``)."""
    media_end: int = 0
    """Index after the last token that stands for a medium; 0: there is none."""
    refusal: str = ""
    """Why there is no result; empty when there is."""


PREFETCH_S_MAX = 30.0
"""The longest time that a router may give a worker to prefetch one prompt."""


class PrefetchKv(Message, frozen=True, kw_only=True):
    """Router -> worker: read the KV of this request's prompt from the sources, before the request comes. Nothing is
    computed.
    """

    worker_id: WorkerId
    epoch: Epoch
    path: str
    body: bytes
    """The client's; likewise the salts, as in ``StartLeg``."""
    cache_salt: str = ""
    media_salt: str = ""
    sources: list[KvSource]
    tokens: int
    """What the router expects to be read, in tokens."""
    eviction_cost: float = 0.0
    """The share of the blocks that the worker lately evicted, of which no worker had a copy when they were computed
    again.
    """
    deadline_s: float


class PrefetchedKv(Message, frozen=True, kw_only=True):
    """Worker -> router: the result of PrefetchKv, in tokens of the prompt."""

    worker_id: WorkerId
    epoch: Epoch
    prompt_tokens: int = 0
    held_tokens: int = 0
    """Tokens that the worker's engine had before."""
    fetched_tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failure: str = ""
    """Why less than all that can be handed over is there now, as text."""
