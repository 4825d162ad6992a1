"""Engines with nothing but a queue, a placement that knows them, and virtual time: what admission needs of a fleet."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from services.router.admission.admission import Admission
from services.router.admission.policy import AdmissionPolicy
from services.router.admission.queues import QueueEntry
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.placement.request_fields import Mode
from services.router.placement.slo import Targets
from shared.contracts.decisions import TtftParts
from shared.contracts.failures import Reason

BUSY = Rejection(reason=Reason.WORKER_BUSY, message="full", retry_after_s=1.0)
NOBODY = Rejection(reason=Reason.NO_WORKER, message="nobody", retry_after_s=1.0)
TOKENS_PER_S = 1000.0


@dataclass
class Engine:
    """Computes prompts one behind the other; a completion then takes ``decode_s`` beside all others."""

    worker_id: str
    legs_max: int = 1000
    decode_s: float = 0.0
    models: tuple[str, ...] = ("m",)
    free_at: float = 0.0
    legs: int = 0
    begun: list[str] = field(default_factory=list)

    @property
    def view(self) -> Any:
        return SimpleNamespace(record=SimpleNamespace(worker_id=self.worker_id))


class Engines:
    """A fleet in virtual time. ``run`` lets time pass; each ticket's end is noted once in ``ends``."""

    def __init__(self, *engines: Engine, **policy: Any) -> None:
        self.engines = {engine.worker_id: engine for engine in engines}
        self.admission = Admission(AdmissionPolicy(**policy), self.place)
        self.now = 0.0
        self.places = 0
        self.placed_at: dict[QueueEntry, float] = {}
        self.first_token_at: dict[QueueEntry, float] = {}
        self.ends: list[tuple[QueueEntry, Placement | Rejection]] = []
        self._events: list[tuple[float, int, Any]] = []
        self._count = 0

    def place(self, need: PlacementRequest, now: float) -> Placement | Rejection:
        self.places += 1
        offering = [one for one in self.engines.values() if need.model in one.models]
        if need.forced is not None:
            offering = [one for one in offering if one.worker_id == need.forced.decode_worker]
        fit = [one for one in offering if one.legs < one.legs_max]
        if not fit:
            return BUSY if offering else NOBODY
        engine = min(fit, key=lambda one: max(one.free_at, now))
        queue_s = max(0.0, engine.free_at - now)
        parts = TtftParts(queue_s=queue_s, prefill_s=need.prompt_tokens / TOKENS_PER_S)
        return Placement(
            mode=Mode.AGGREGATED,
            decode=engine.view,
            uncached_tokens=need.prompt_tokens,
            predicted=parts,
            predicted_itl_s=0.01 * (engine.legs + 1),
            considered=len(offering),
        )

    def offer(self, tokens: int = 100, *, ends_at: float = float("inf"), **need: Any) -> QueueEntry:
        """A request comes now."""
        ticket = QueueEntry(ask(tokens, **need), self.now, ends_at)
        verdict = self.admission.offer(ticket, self.now)
        if verdict is not None:
            self._decided(ticket, verdict)
        self._turns()
        return ticket

    def withdraw(self, ticket: QueueEntry) -> None:
        self.admission.withdraw(ticket)
        self._turns()

    def run(self, until: float = float("inf")) -> None:
        """Let time pass: prompts and completions end, timers ring."""
        while True:
            wakes_at = self.admission.wakes_at(self.now)
            next_at = min(self._events[0][0] if self._events else float("inf"), wakes_at or float("inf"))
            if next_at > until or next_at == float("inf"):
                self.now = max(self.now, until) if until < float("inf") else self.now
                return
            self.now = max(self.now, next_at)
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self._turns()

    def _turns(self) -> None:
        for _ in range(100):
            for ticket, verdict in self.admission.turn(self.now):
                self._decided(ticket, verdict)
            wakes_at = self.admission.wakes_at(self.now)
            if wakes_at is None or wakes_at > self.now:
                return
        raise AssertionError("turns without an end")

    def _decided(self, ticket: QueueEntry, verdict: Placement | Rejection) -> None:
        self.ends.append((ticket, verdict))
        if isinstance(verdict, Rejection):
            return
        engine = self.engines[verdict.decode.record.worker_id]
        engine.legs += 1
        engine.begun.append(ticket.need.tenant)
        engine.free_at = max(engine.free_at, self.now) + ticket.need.prompt_tokens / TOKENS_PER_S
        self.placed_at[ticket] = self.now
        self.first_token_at[ticket] = engine.free_at
        self._at(engine.free_at, lambda: None)
        self._at(engine.free_at + engine.decode_s, lambda: self._end(ticket, engine))

    def _end(self, ticket: QueueEntry, engine: Engine) -> None:
        engine.legs -= 1
        self.admission.ended(ticket, ticket.need.prompt_tokens, ticket.need.tokens_out)

    def _at(self, at: float, what: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, what))

    def reason(self, ticket: QueueEntry) -> Reason | None:
        """Why it was refused; None when it was not."""
        verdict = dict(self.ends)[ticket]
        return verdict.reason if isinstance(verdict, Rejection) else None


def ask(
    tokens: int = 100, *, ttft_s: float = float("inf"), itl_s: float = float("inf"), **need: Any
) -> PlacementRequest:
    fields: dict[str, Any] = {"model": "m", "tokens_out": 1, **need}
    return PlacementRequest(prompt_tokens=tokens, targets=Targets(ttft_s=ttft_s, itl_s=itl_s), **fields)
