"""Counts that a router keeps of its own legs without any report, for baselines that use them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from replay.legs import Leg, ReplayedRequest
from shared.contracts.ids import WorkerId
from shared.contracts.inference import LegKind


@dataclass(slots=True)
class Active:
    """Legs of one worker that were sent and have not ended."""

    requests: int = 0
    prefill_tokens: int = 0
    """Uncached prompt tokens of legs without a first token, as predicted when they were sent."""
    prefill_s: float = 0.0
    """The same in seconds, for policies that predict seconds."""
    context_tokens: int = 0
    """Prompt tokens of all of them."""


class RequestCounts:
    """Counts of all workers."""

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
