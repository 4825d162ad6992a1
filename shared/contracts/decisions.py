"""Why a request was placed where it was: the candidates, the predictions, and what was then measured."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from shared.contracts.ids import DecisionId, RequestId, RouterId, WorkerId
from shared.contracts.kv_exchange import KvSource
from shared.contracts.message import Message


class Part(StrEnum):
    """The part of a request that a worker may serve."""

    PREFILL = "prefill"
    DECODE = "decode"
    WHOLE = "whole"
    """Prompt and completion on one worker."""


class TtftParts(Message, frozen=True, kw_only=True):
    """The time to the first token, split, in seconds; the parts add up to it, and an unknown part is 0."""

    admission_s: float = 0.0
    """In the router's admission queue."""
    tokenize_s: float = 0.0
    place_s: float = 0.0
    failed_s: float = 0.0
    """Spent on attempts that failed."""
    queue_s: float = 0.0
    """In the queue of the engine that computes the prompt."""
    fetch_s: float = 0.0
    """Asking other workers for the prompt's KV and reading it, before the rest is computed."""
    prefill_s: float = 0.0
    """Computing the rest of the prompt."""
    handoff_s: float = 0.0
    """Until the decode worker then has the prompt's KV; 0 when one worker serves both legs."""
    decode_queue_s: float = 0.0
    first_token_s: float = 0.0
    """The decode worker's first step."""
    transit_s: float = 0.0
    """The rest: bus, relay, scheduling of processes."""

    def total_s(self) -> float:
        """The time to the first token."""
        return float(sum(getattr(self, name) for name in self.__struct_fields__))


class CandidateRecord(Message, frozen=True, kw_only=True):
    """A worker that could have served a part of the request, and its predicted cost. Seconds, tokens."""

    worker_id: WorkerId
    part: Part
    chosen: bool = False
    cached_tokens: int = 0
    fetched_tokens: int = 0
    computed_tokens: int = 0
    queue_s: float = 0.0
    fetch_s: float = 0.0
    prefill_s: float = 0.0
    handoff_s: float = 0.0
    decode_s: float = 0.0
    """To generate the completion."""
    within_s: float = 0.0
    """The part of ``decode_s`` that is within the target between tokens, and so costs nothing."""
    first_token_s: float = 0.0
    """The step that computes what was not handed over, and with it the first token."""
    transit_s: float = 0.0
    """A leg's time outside the engine: bus, relay, scheduling of processes."""
    others_s: float = 0.0
    """The time that it adds to all other requests together."""
    cost_s: float = 0.0
    """What placement compares: the sum of the above, less ``within_s``."""
    meets_targets: bool = True


class DecisionRecord(Message, frozen=True, kw_only=True):
    """One placement, and how its attempt ended. -1 where a number is not known (yet)."""

    decision_id: DecisionId
    router_id: RouterId
    request_id: RequestId
    at_unix_s: float
    model: str
    mode: str
    """aggregated, disaggregated or decode_first; empty when no worker could serve it."""
    reason: str
    """Why these workers, or why none; text for people."""
    attempt: int = 1
    earlier: DecisionId = DecisionId("")
    """The decision of the attempt before this one, which failed."""
    prompt_tokens: int = 0
    exact: bool = False
    """Whether the prompt was tokenized as the engine does; otherwise cached tokens are an estimate."""
    tenant: str = ""
    priority: int = 0
    ttft_target_s: float = -1.0
    itl_target_s: float = -1.0
    considered: int = 0
    """Free workers that could have been chosen; ``candidates`` are the best of them."""
    candidates: list[CandidateRecord] = msgspec.field(default_factory=list)
    prefill_worker: str = ""
    decode_worker: str = ""
    sources: list[KvSource] = msgspec.field(default_factory=list)
    predicted: TtftParts = TtftParts()
    predicted_itl_s: float = -1.0
    measured: TtftParts | None = None
    """None until the request has ended, and if it never had a first token."""
    ttft_s: float = -1.0
    itl_s: float = -1.0
    predicted_cached_tokens: int = -1
    cached_tokens: int = -1
    regret_s: float = -1.0
    """By how much the measured time to the first token exceeds the best prediction for another candidate."""
    outcome: str = ""
    """Empty while it runs; then ``ok``, or the ``Reason`` that ended it."""


class AskDecision(Message, frozen=True, kw_only=True):
    """Anyone -> a router: one of its decisions; the newest when neither field is set."""

    router_id: RouterId
    decision_id: DecisionId = DecisionId("")
    request_id: RequestId = RequestId("")
    """The last decision for that request."""


class FoundDecision(Message, frozen=True, kw_only=True):
    """Router -> the sender of ``AskDecision``."""

    decision: DecisionRecord | None
    """None: this router never made it, or has dropped it."""
