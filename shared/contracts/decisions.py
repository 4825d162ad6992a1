"""Placement decisions: candidates, predicted costs and measured results."""

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
    """The parts of the time to the first token in seconds; their sum is the TTFT. Unknown parts are 0."""

    admission_s: float = 0.0
    """Time in the router's admission queue."""
    tokenize_s: float = 0.0
    place_s: float = 0.0
    failed_s: float = 0.0
    """Spent on attempts that failed."""
    queue_s: float = 0.0
    """Time in the queue of the engine that computes the prompt."""
    fetch_s: float = 0.0
    """Requesting and reading the prompt's KV from other workers, before the rest is computed."""
    prefill_s: float = 0.0
    """Computing the rest of the prompt."""
    handoff_s: float = 0.0
    """From the end of the prefill until the decode worker has the KV, if the first token waits for it."""
    decode_queue_s: float = 0.0
    decode_prefill_s: float = 0.0
    """Computing on the decode worker what was not handed over: the prompt's tail, or all of it where a handoff failed.
    0 where the prefill worker's token is the first one.
    """
    front_end_and_bus_s: float = 0.0
    """The rest, most of it in the workers' HTTP front ends: reading and checking the request, rendering the prompt,
    writing the answer; then the bus, the relay, and processes that wait for a CPU.
    """

    def total_s(self) -> float:
        total_s: float = sum(msgspec.structs.astuple(self))
        return total_s


class CandidateRecord(Message, frozen=True, kw_only=True):
    """A worker that could serve a part of the request, with its predicted cost. Seconds, tokens."""

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
    """Time to generate the completion."""
    within_s: float = 0.0
    """The part of ``decode_s`` that costs nothing; all of it where the decode batch is not crowded."""
    decode_prefill_s: float = 0.0
    """The step that computes the tokens whose KV was not handed over, and the first token that the worker samples."""
    front_end_and_bus_s: float = 0.0
    """A leg's time outside the engine: the worker's HTTP front end, bus and relay. Of a streamed pair, one path's."""
    others_s: float = 0.0
    """Total delay that it causes to other requests, and to later ones, by what it evicts."""
    cost_s: float = 0.0
    """What placement minimizes: the sum of the fields above without ``within_s``, which is subtracted."""
    meets_targets: bool = True


class PrefetchRecord(Message, frozen=True, kw_only=True):
    """What a worker read of a prompt's KV before the request's legs began, in tokens."""

    worker_id: WorkerId
    is_order: bool = False
    """Whether the client ordered this, and nothing else."""
    held_tokens: int = 0
    """Tokens that the worker had before."""
    fetched_tokens: int = 0
    seconds: float = 0.0
    failure: str = ""
    """Why less than all that other workers have is there now; text for people."""


class DecisionRecord(Message, frozen=True, kw_only=True):
    """One placement and the result of its attempt. -1: number unknown (so far)."""

    decision_id: DecisionId
    router_id: RouterId
    request_id: RequestId
    at_unix_s: float
    model: str
    mode: str
    """aggregated, disaggregated or decode_first; empty when no worker could serve it."""
    reason: str
    """Why these workers, or none, were chosen; text for people."""
    attempt: int = 1
    earlier: DecisionId = DecisionId("")
    """The decision of the previous, failed attempt."""
    prompt_tokens: int = 0
    """Tokens as placement knew them: what no worker holds of the prompt is not tokenized, and its length is
    estimated."""
    counted_prompt_tokens: int = -1
    """Tokens as the engine counted them; -1 while that is unknown."""
    exact: bool = False
    """Whether the prompt was tokenized exactly as by the engine; otherwise cached tokens are an estimate."""
    why_inexact: str = ""
    """Why not, where the router knows: its media were not rendered in time, ...; text for people."""
    tenant: str = ""
    priority: int = 0
    ttft_target_s: float = -1.0
    itl_target_s: float = -1.0
    considered: int = 0
    """Number of workers with capacity for the request; ``candidates`` are the best of them."""
    candidates: list[CandidateRecord] = msgspec.field(default_factory=list)
    prefill_worker: str = ""
    decode_worker: str = ""
    sources: list[KvSource] = msgspec.field(default_factory=list)
    predicted: TtftParts = TtftParts()
    predicted_itl_s: float = -1.0
    ttft_probability: float = -1.0
    """The probability, at placement, that the TTFT target is met: how many of the newest requests of the model with
    such a prediction were as near to it as this one may be. -1: there is no target, or too few requests have ended.
    """
    itl_probability: float = -1.0
    """The probability, at placement, that the ITL target is met: how many of the newest requests of the model with such
    a prediction would have met it. -1: as for the TTFT.
    """
    measured: TtftParts | None = None
    """None until the request has finished, and without a first token."""
    ttft_s: float = -1.0
    itl_s: float = -1.0
    predicted_cached_tokens: int = -1
    cached_tokens: int = -1
    recompute_slowed_s: float = -1.0
    """See ``RequestFinished``."""
    drafted_tokens: int = 0
    """Tokens of the answer that the answering worker's drafter proposed (speculative decoding)."""
    accepted_tokens: int = 0
    """Drafted tokens that the model agreed with."""
    cache_hit_threshold: float = -1.0
    """The share of the prompt below which the answering worker refuses; -1: none."""
    threshold_from: str = ""
    """Who set it: ``request``, ``worker_default``, ``decode_first`` or ``failure_policy``; empty: nobody."""
    hit_share: float = -1.0
    """The share of the prompt that was cached or fetched, or could have been; -1: unknown, or there is no threshold."""
    gap_worker: str = ""
    """The worker whose gap between prompts the request waited for in the admission queue; empty: none."""
    gap_step_s: float = 0.0
    """A step of that worker with as many prompt tokens as it computes at once: longer than the ITL target."""
    regret_s: float = -1.0
    """Excess of the measured time to the first token over the best prediction for another candidate."""
    prefetch: PrefetchRecord | None = None
    """What was prefetched for the request; None: nothing."""
    outcome: str = ""
    """Empty while the request runs; then ``ok`` or the ``Reason`` for which it failed."""


class AskDecision(Message, frozen=True, kw_only=True):
    """Anyone -> router: requests one of its decisions; the newest when neither id is set."""

    router_id: RouterId
    decision_id: DecisionId = DecisionId("")
    request_id: RequestId = RequestId("")
    """The last decision for that request."""
    tenant: str | None = None
    """Only a decision of this tenant's requests; None: of any tenant."""


class FoundDecision(Message, frozen=True, kw_only=True):
    """Reply to AskDecision."""

    decision: DecisionRecord | None
    """None when this router did not make the decision, no longer has it, or it is another tenant's."""
