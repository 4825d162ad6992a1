"""Why a request went where it went: what was considered, what was predicted, and what then came of it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from shared.contracts.ids import DecisionId, RequestId, RouterId, WorkerId
from shared.contracts.kv_exchange import KvSource
from shared.contracts.message import Message


class Part(StrEnum):
    """What a candidate was considered for."""

    PREFILL = "prefill"
    DECODE = "decode"
    WHOLE = "whole"
    """Prompt and completion on one worker."""


class TtftParts(Message, frozen=True, kw_only=True):
    """Where the time to the first token goes, in seconds; what is not known is 0. They add up to it."""

    admission_s: float = 0.0
    """In the router's own queue."""
    tokenize_s: float = 0.0
    place_s: float = 0.0
    failed_s: float = 0.0
    """Spent on attempts that failed."""
    queue_s: float = 0.0
    """In the queue of the engine that computes the prompt."""
    fetch_s: float = 0.0
    """Asking other workers for KV of the prompt and reading it, before the rest is computed."""
    prefill_s: float = 0.0
    """Computing what nobody could hand over."""
    handoff_s: float = 0.0
    """What the decode worker then needs to get the prompt's KV; 0 when one worker does both."""
    decode_queue_s: float = 0.0
    first_token_s: float = 0.0
    """The decode worker's first step."""
    transit_s: float = 0.0
    """The rest: bus, relay, scheduling of processes."""

    def total_s(self) -> float:
        """The time to the first token."""
        return float(sum(getattr(self, name) for name in self.__struct_fields__))


class Candidate(Message, frozen=True, kw_only=True):
    """One worker that could have served a part of the request, and what that was predicted to cost. Seconds, tokens."""

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
    """Of that, what is within the target between tokens, and so costs nothing."""
    first_token_s: float = 0.0
    """The step that computes what was not handed over, and with it the first token."""
    transit_s: float = 0.0
    """Of a leg, beside the engine: bus, relay, scheduling of processes."""
    others_s: float = 0.0
    """By how much it delays all other requests together."""
    cost_s: float = 0.0
    """What is compared: all of the above, less ``within_s``."""
    meets_targets: bool = True


class Decision(Message, frozen=True, kw_only=True):
    """One placement, and how it turned out. -1 where not known (yet)."""

    decision_id: DecisionId
    router_id: RouterId
    request_id: RequestId
    at_unix_s: float
    model: str
    mode: str
    """aggregated, disaggregated or decode_first; empty when nobody could serve it."""
    reason: str
    """In words: why this one."""
    attempt: int = 1
    earlier: DecisionId = DecisionId("")
    """The one of the attempt before this; it failed."""
    prompt_tokens: int = 0
    exact: bool = False
    """Whether the prompt was tokenized as the engine does, so that cached tokens are known and not guessed."""
    tenant: str = ""
    priority: int = 0
    ttft_target_s: float = -1.0
    itl_target_s: float = -1.0
    considered: int = 0
    """Workers that could have been chosen; ``candidates`` are the best of them."""
    candidates: list[Candidate] = msgspec.field(default_factory=list)
    prefill_worker: str = ""
    decode_worker: str = ""
    sources: list[KvSource] = msgspec.field(default_factory=list)
    predicted: TtftParts = TtftParts()
    predicted_itl_s: float = -1.0
    measured: TtftParts | None = None
    """None until the request has ended, and where it never had a first token."""
    ttft_s: float = -1.0
    itl_s: float = -1.0
    predicted_cached_tokens: int = -1
    cached_tokens: int = -1
    regret_s: float = -1.0
    """By how much the measured time to the first token exceeds the best that was predicted for another candidate."""
    outcome: str = ""
    """Empty while it runs; then ``ok``, or the ``Reason`` that ended it."""


class AskDecision(Message, frozen=True, kw_only=True):
    """Anyone -> the router that decided: why? Its newest decision when neither is named."""

    router_id: RouterId
    decision_id: DecisionId = DecisionId("")
    request_id: RequestId = RequestId("")
    """The last decision for that request."""


class FoundDecision(Message, frozen=True, kw_only=True):
    """Router -> asker."""

    decision: Decision | None
    """None: never made here, or forgotten since."""
