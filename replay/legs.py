"""A replayed request, its legs, and a router's counts of legs per worker."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from replay.engine import Job
from replay.simworker import SimWorker
from replay.traces import Request
from services.router.placement.placement import Placement
from services.router.state.worker_view import Sent
from shared.contracts.ids import WorkerId
from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import KvSource


@dataclass(slots=True, eq=False)
class ReplayedRequest:
    """One request and its outcome. Times are those seen by the client."""

    number: int
    request: Request
    chain: tuple[int, ...]
    placement: Placement | None = None
    refused_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    cached_tokens: int = 0
    """Prompt tokens cached at the worker that computed the prompt."""
    fetched_tokens: int = 0
    preemptions: int = 0

    @property
    def ttft_s(self) -> float:
        """Seconds; the request must have been served."""
        assert self.first_token_at is not None
        return self.first_token_at - self.request.at_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds between tokens; 0 for a single token."""
        assert self.first_token_at is not None
        assert self.finished_at is not None
        return (self.finished_at - self.first_token_at) / max(1, self.request.output_tokens - 1)


@dataclass(slots=True, eq=False)
class Leg:
    """The part of a request that one worker serves."""

    kind: LegKind
    replayed: ReplayedRequest
    worker: SimWorker
    job: Job
    sent: Sent
    uncached_tokens: int = 0
    """As predicted by placement."""
    sources: tuple[KvSource, ...] = ()
    reads_from: Leg | None = None
    """The prefill leg whose KV this one reads."""
    read_by: Leg | None = None
    booked_tokens: int = 0
    """Prompt tokens, from the start, that have arrived or are on the link."""
    pins: list[tuple[SimWorker, list[int]]] = field(default_factory=list)
    """Blocks pinned at other workers until they are read."""


@dataclass(slots=True)
class Active:
    """Counts of one worker's legs that were sent and have not ended."""

    requests: int = 0
    prefill_tokens: int = 0
    """Uncached prompt tokens of legs without a first token, as predicted when they were sent."""
    prefill_s: float = 0.0
    """The time for ``prefill_tokens``, for policies that predict times."""
    context_tokens: int = 0
    """Prompt tokens of all of them."""


class RequestCounts:
    """Counts of legs by worker."""

    def __init__(self) -> None:
        self.active: defaultdict[WorkerId, Active] = defaultdict(Active)
        self.replayed: ReplayedRequest | None = None
        """The request that is being placed."""
        self.predicted_s: dict[int, float] = {}
        """Predicted prefill time by request number, until the prompt is computed."""

    def arrives(self, replayed: ReplayedRequest) -> None:
        """A request is about to be placed."""
        self.replayed = replayed

    def started(self, leg: Leg) -> None:
        """A leg was sent."""
        active = self.active[leg.worker.worker_id]
        active.requests += 1
        active.context_tokens += leg.job.prompt_tokens
        active.prefill_tokens += leg.uncached_tokens
        if leg.kind is not LegKind.DECODE:
            active.prefill_s += self.predicted_s.get(leg.replayed.number, 0.0)

    def prompt_computed(self, leg: Leg) -> None:
        """A leg's first token arrived."""
        active = self.active[leg.worker.worker_id]
        active.prefill_tokens -= leg.uncached_tokens
        if leg.kind is not LegKind.DECODE:
            active.prefill_s -= self.predicted_s.pop(leg.replayed.number, 0.0)

    def ended(self, leg: Leg) -> None:
        """A leg ended."""
        active = self.active[leg.worker.worker_id]
        active.requests -= 1
        active.context_tokens -= leg.job.prompt_tokens
