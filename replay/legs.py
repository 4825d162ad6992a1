"""A replayed request and its legs."""

from __future__ import annotations

from dataclasses import dataclass, field

from replay.job import Job
from replay.simworker import SimWorker
from replay.traces import Request
from services.router.placement.placement import Placement
from services.router.state.sent_work import Sent
from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import KvSource


@dataclass(slots=True, eq=False)
class ReplayedRequest:
    """One request and its outcome. Instants are the client's."""

    number: int
    request: Request
    chain: tuple[int, ...]
    placed: Placement | None = None
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
    """Prompt tokens, from the start, that are here or on the link."""
    pins: list[tuple[SimWorker, list[int]]] = field(default_factory=list)
    """Blocks pinned at other workers until they are read."""
