"""Engines in virtual time that consist of a queue, and a placement over them, for admission tests."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any

from services.router.admission.admission import Admission
from services.router.admission.policy import AdmissionPolicy
from services.router.admission.queues import QueueEntry
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.placement.slo import Targets
from services.router.request.facts import Mode
from services.router.state.worker_view import WorkerView
from shared.contracts.decisions import TtftParts
from shared.contracts.failures import Reason
from tests.support.fleet_builders import record

BUSY = Rejection(reason=Reason.WORKER_BUSY, message="full", retry_after_s=1.0)
NONE_READY = Rejection(reason=Reason.NO_WORKER, message="none ready", retry_after_s=1.0)
TOKENS_PER_S = 1000.0


@dataclass
class Engine:
    """Computes prompts one after the other; a completion then takes ``decode_s``, in parallel with others."""

    worker_id: str
    legs_max: int = 1000
    decode_s: float = 0.0
    models: tuple[str, ...] = ("m",)
    step_s: float = 0.0
    prompt_step_s: float = 0.0
    """A decode step, and what a full step of prompt tokens adds."""
    computed_lately: bool = False
    """Its latest work was a long prompt, by which decode steps seem slow."""
    free_at: float = 0.0
    legs: int = 0
    begun: list[str] = field(default_factory=list)

    @property
    def view(self) -> WorkerView:
        return WorkerView(record(self.worker_id), 0, 0.0)


class Engines:
    """``run`` lets time pass. ``ends`` records the result of each entry once."""

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

    def place(self, request: PlacementRequest, now: float) -> Placement | Rejection:
        self.places += 1
        offering = [one for one in self.engines.values() if request.model in one.models]
        if request.forced is not None:
            offering = [one for one in offering if one.worker_id == request.forced.decode_worker]
        fit = [one for one in offering if one.legs < one.legs_max and one.worker_id not in request.excluded]
        if not fit:
            return BUSY if offering else NONE_READY
        engine = min(fit, key=lambda one: max(one.free_at, now))
        queue_s = max(0.0, engine.free_at - now)
        parts = TtftParts(queue_s=queue_s, prefill_s=request.prompt_tokens / TOKENS_PER_S)
        return Placement(
            mode=Mode.AGGREGATED,
            decode=engine.view,
            uncached_tokens=request.prompt_tokens,
            predicted=parts,
            predicted_itl_s=0.01 * (engine.legs + 1) * (10.0 if engine.computed_lately else 1.0),
            answer_step_s=0.01 * (engine.legs + 1),
            step_s=engine.step_s,
            prompt_step_s=engine.prompt_step_s,
            considered=len(offering),
        )

    def offer(self, tokens: int = 100, *, ends_at: float = float("inf"), **request: Any) -> QueueEntry:
        """Offer a request that arrives now."""
        entry = QueueEntry(ask(tokens, **request), self.now, ends_at)
        result = self.admission.offer(entry, self.now)
        if result is not None:
            self._decided(entry, result)
        self._schedule()
        return entry

    def withdraw(self, entry: QueueEntry) -> None:
        self.admission.withdraw(entry)
        self._schedule()

    def run(self, until: float = float("inf")) -> None:
        """Advance time: prompts and completions end, timers fire."""
        while True:
            wakes_at = self.admission.wakes_at(self.now)
            next_at = min(self._events[0][0] if self._events else float("inf"), wakes_at or float("inf"))
            if next_at > until or next_at == float("inf"):
                self.now = max(self.now, until) if until < float("inf") else self.now
                return
            self.now = max(self.now, next_at)
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self._schedule()

    def _schedule(self) -> None:
        for _ in range(100):
            for entry, result in self.admission.schedule(self.now):
                self._decided(entry, result)
            wakes_at = self.admission.wakes_at(self.now)
            if wakes_at is None or wakes_at > self.now:
                return
        raise AssertionError("scheduling does not end")

    def _decided(self, entry: QueueEntry, result: Placement | Rejection) -> None:
        self.ends.append((entry, result))
        if isinstance(result, Rejection):
            return
        engine = self.engines[result.decode.record.worker_id]
        engine.legs += 1
        engine.begun.append(entry.request.tenant)
        engine.free_at = max(engine.free_at, self.now) + entry.request.prompt_tokens / TOKENS_PER_S
        self.placed_at[entry] = self.now
        self.first_token_at[entry] = engine.free_at
        self._at(engine.free_at, lambda: None)
        self._at(engine.free_at + engine.decode_s, lambda: self._end(entry, engine))

    def _end(self, entry: QueueEntry, engine: Engine) -> None:
        engine.legs -= 1
        self.admission.ended(entry, entry.request.prompt_tokens, entry.request.sequences * entry.request.tokens_out)

    def _at(self, at: float, what: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, what))

    def reason(self, entry: QueueEntry) -> Reason | None:
        result = dict(self.ends)[entry]
        return result.reason if isinstance(result, Rejection) else None


def ask(
    tokens: int = 100, *, ttft_s: float = float("inf"), itl_s: float = float("inf"), **request: Any
) -> PlacementRequest:
    fields: dict[str, Any] = {"model": "m", "tokens_out": 1, **request}
    return PlacementRequest(prompt_tokens=tokens, targets=Targets(ttft_s=ttft_s, itl_s=itl_s), **fields)
