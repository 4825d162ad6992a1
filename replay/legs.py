"""A request on its way through the fleet, and its legs."""

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
class Flight:
    """One request, and when what happened to it. Instants are those at the client."""

    number: int
    request: Request
    chain: tuple[int, ...]
    placed: Placement | None = None
    refused_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    cached_tokens: int = 0
    """Of its prompt, where it was computed."""
    fetched_tokens: int = 0
    preemptions: int = 0

    @property
    def ttft_s(self) -> float:
        """Expects that it was served."""
        assert self.first_token_at is not None
        return self.first_token_at - self.request.at_s

    @property
    def tpot_s(self) -> float:
        """The mean time between its tokens; 0 when it has but one."""
        assert self.first_token_at is not None
        assert self.finished_at is not None
        return (self.finished_at - self.first_token_at) / max(1, self.request.output_tokens - 1)


@dataclass(slots=True, eq=False)
class Leg:
    """What one worker does of it."""

    kind: LegKind
    flight: Flight
    worker: SimWorker
    job: Job
    sent: Sent
    uncached_tokens: int = 0
    """As placement expected."""
    sources: tuple[KvSource, ...] = ()
    reads_from: Leg | None = None
    """The prefill leg whose prompt this one takes over."""
    read_by: Leg | None = None
    booked_tokens: int = 0
    """Of the prompt, from its start: those here already or on the link."""
    pins: list[tuple[SimWorker, list[int]]] = field(default_factory=list)
    """Blocks of others that are kept until they are read."""
