"""What a router can count by itself, without any report: its own legs. Baselines that do so find it here."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from replay.legs import Flight, Leg
from shared.contracts.ids import WorkerId
from shared.contracts.inference import LegKind


@dataclass(slots=True)
class Active:
    """Of one worker: legs sent and not yet ended."""

    requests: int = 0
    prefill_tokens: int = 0
    """Uncached prompt tokens, as predicted when they were sent, of legs without a first token."""
    prefill_s: float = 0.0
    """The same in seconds, for policies that predict them."""
    context_tokens: int = 0
    """Prompt tokens of all of them."""


class Ledger:
    """By worker."""

    def __init__(self) -> None:
        self.active: defaultdict[WorkerId, Active] = defaultdict(Active)
        self.flight: Flight | None = None
        """The one that is being placed."""
        self.predicted_s: dict[int, float] = {}
        """By flight: the prefill time that the policy predicted, until its prompt is computed."""

    def arrives(self, flight: Flight) -> None:
        """It is to be placed."""
        self.flight = flight

    def started(self, leg: Leg) -> None:
        """A leg was sent."""
        active = self.active[leg.worker.worker_id]
        active.requests += 1
        active.context_tokens += leg.job.prompt_tokens
        active.prefill_tokens += leg.uncached_tokens
        if leg.kind is not LegKind.DECODE:
            active.prefill_s += self.predicted_s.get(leg.flight.number, 0.0)

    def prompt_computed(self, leg: Leg) -> None:
        """Its first token came."""
        active = self.active[leg.worker.worker_id]
        active.prefill_tokens -= leg.uncached_tokens
        if leg.kind is not LegKind.DECODE:
            active.prefill_s -= self.predicted_s.pop(leg.flight.number, 0.0)

    def ended(self, leg: Leg) -> None:
        """It is over."""
        active = self.active[leg.worker.worker_id]
        active.requests -= 1
        active.context_tokens -= leg.job.prompt_tokens
