"""The legs of a request: what a router asks of a worker, and the frames that come back.

A leg begins with ``StartLeg`` on the worker's subject. The worker answers on the router's frame subject with one HEAD
frame, DATA frames and then exactly one END or FAILURE frame, numbered from 0. Frames of many legs travel in one
``FrameBatch``, so that the cost per message does not grow with the number of streams.
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
    """Which part of a generation a leg is."""

    AGGREGATED = "aggregated"
    """Prompt and completion on this worker."""
    PREFILL = "prefill"
    """The prompt's KV only: one token, thrown away; the report carries the KV transfer."""
    DECODE = "decode"
    """The completion, from the KV that ``StartLeg.kv_transfer`` describes."""


class StartLeg(Message, frozen=True, kw_only=True):
    """Router -> worker: serve this leg. ``body`` is the client's own bytes, never rewritten by the router."""

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
    """The life of the worker that placement chose; a worker of another epoch refuses the leg."""
    deadline_s: float
    """Seconds that the worker may spend on this leg before it fails it with DEADLINE."""
    kv_transfer: bytes = b""
    """For DECODE: what the prefill leg's report gave, unread by the router (JSON of ``kv_transfer_params``)."""
    prefill_cached_tokens: int = 0
    """For DECODE: prompt tokens that the prefill leg had cached, so that the usage numbers are true."""
    kv_offer: bool = True
    """For PREFILL: whether to lease the blocks at the end; not when the decode leg follows the prefill as it goes."""
    kv_sources: list[KvSource] = msgspec.field(default_factory=list)
    """Who is believed to hold more of the prompt than this worker does."""
    expected_tokens: int = -1
    """Prompt tokens that placement expects this worker to compute, reported as waiting until then; -1: not known."""
    cache_hit_threshold: float | None = None
    """The client's; None: the worker's own. Prefill legs are exempt."""
    kv_fetch_min_tokens: int | None = None
    """The client's; None: the worker's own."""
    resume: bytes | None = None
    """Token ids that the client has already had from a leg that broke off, packed (see ``pack_tokens``). The engine
    goes on behind them, and the answer holds only what comes after them. None: from the beginning.
    """
    resume_joined: bytes = b""
    """Indexes of those of them that the first engine's server heard of together with the one before, packed (see
    ``Frame.joined``)."""
    created: int = 0
    """With ``resume``: when the answer began, as its events say (Unix seconds); 0: not known."""
    cache_salt: str = ""
    """Replaces the body's own, from which it was made: only requests of one tenant share cached KV. Empty: the body
    stays as it is.
    """


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as 32-bit integers, little-endian on every machine that vLLM runs on."""
    return array("I", tokens).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """The ids in ``packed``. Raises ValueError when its length is no multiple of 4."""
    return array("I", packed).tolist()


class CancelLeg(Message, frozen=True, kw_only=True):
    """Router -> worker: nobody waits for this leg any more; abort it and send no more frames of it."""

    worker_id: WorkerId
    leg_id: LegId


CACHE_THRESHOLD = "cache_threshold"
"""The finish reason of a leg that was refused for the share of its prompt that is cached."""


class LegReport(Message, frozen=True, kw_only=True):
    """Worker -> router, in the END frame: what the leg cost. Times are seconds on the worker's monotonic clock."""

    prompt_tokens: int = 0
    """The client's. What an engine went on behind (``StartLeg.resume``) is in ``kv`` only, where its prompt is told."""
    cached_tokens: int = 0
    """Prompt tokens found in this worker's own prefix cache."""
    received_tokens: int = 0
    """Prompt tokens whose KV came from another worker."""
    completion_tokens: int = 0
    """Of the whole answer: those that this leg went on behind are among them."""
    received_bytes: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    """From the first scheduling to the first token."""
    first_token_s: float = 0.0
    """From the leg's arrival at the worker to its first token."""
    total_s: float = 0.0
    kv_transfer: bytes = b""
    """For PREFILL: what a decode worker needs to read the KV (JSON of ``kv_transfer_params``)."""
    finish_reason: str = ""
    kv: KvTransferReport | None = None
    """Where the prompt's KV came from; None where the engine's connector does not tell."""


class FrameKind(IntEnum):
    """What a frame is."""

    HEAD = 0
    DATA = 1
    END = 2
    FAILURE = 3


class Frame(PackedMessage, frozen=True, kw_only=True):
    """One piece of a leg's answer."""

    leg_id: LegId
    seq: int
    """0 for the HEAD, then one more for each frame: a gap means that frames were lost."""
    kind: FrameKind
    data: bytes = b""
    """DATA: bytes for the client, as they are (for streams: whole SSE events)."""
    token_ids: list[int] = msgspec.field(default_factory=list)
    """DATA: the token ids that ``data`` stands for."""
    status: int = 0
    """HEAD: the HTTP status."""
    content_type: str = ""
    """HEAD: the answer's content type."""
    report: LegReport | None = None
    """END: what the leg cost."""
    failure: Failure | None = None
    """FAILURE: why there is no more."""
    joined: list[int] | None = None
    """DATA: indexes of those ``token_ids`` that the engine's server heard of together with the one before. What its
    parsers have said of a tool call may depend on that: whoever goes on behind these tokens tells them alike.
    """


class FrameBatch(PackedMessage, frozen=True, kw_only=True):
    """Worker -> router: the frames of one turn of the worker's loop, of any number of this router's legs."""

    router_id: RouterId
    worker_id: WorkerId
    epoch: Epoch
    frames: list[Frame]
    in_flight: list[LegId] | None = None
    """The in-flight list, at intervals: all legs of this router that the worker serves after these frames. A leg that
    only one side knows is an orphan.
    """


KV_MOVES_MAX = 8
"""That a finished request tells of."""


class KvMoved(Message, frozen=True, kw_only=True):
    """KV that one worker read from another for a request."""

    source_id: WorkerId
    reader_id: WorkerId
    tokens: int = 0
    bytes: int = 0


class RequestFinished(Message, frozen=True, kw_only=True):
    """One request's story as its router saw it, for metrics. Seconds; tokens; -1 where not known."""

    request_id: RequestId
    model: str
    path: str
    mode: str
    """aggregated, disaggregated or decode_first."""
    status: int
    decision_id: DecisionId = DecisionId("")
    """The last placement."""
    trace_id: str = ""
    """Its trace, 32 hexadecimal digits; empty when none was kept."""
    tenant: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    reason: str = ""
    """Empty, or the ``Reason`` that ended it."""
    attempts: int = 1
    resumes: int = 0
    """How often its stream broke off and went on elsewhere."""
    resumed_tokens: int = 0
    """Tokens that the client had already had at those times, all together."""
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
    """Where the time to the first token went; None where there was none."""
    prefill_s: float = -1.0
    streamed_handoff: bool = False
    """The decode leg read the KV while the prompt was being computed."""
    recomputed_tokens: int = -1
    """Prompt tokens that the decode worker of a disaggregated request computed."""
    reprefilled_tokens: int = -1
    """Computed again after preemptions."""
    readback_tokens: int = -1
    """Prompt tokens that the prefill worker fetched from others."""
    kv_wait_s: float = -1.0
    """From the first ask for KV to the first grant of it."""
    kv_read_s: float = -1.0
    kv_moves: list[KvMoved] = msgspec.field(default_factory=list)
    """From whom its workers read, as far as they tell: at most ``KV_MOVES_MAX``."""
    ttft_target_s: float = -1.0
    """What it was to experience at most; likewise ``itl_target_s``."""
    itl_target_s: float = -1.0


class RequestsFinished(Message, frozen=True, kw_only=True):
    """Router -> metrics collector: the requests that ended since the last such message."""

    router_id: RouterId
    requests: list[RequestFinished]
