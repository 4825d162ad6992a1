"""The event loop: requests arrive, a placer chooses, engines work, the client sees tokens. All in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any

from replay.admission import Authenticator
from replay.engine import Engine
from replay.exchange import Exchange
from replay.job import Job
from replay.knowledge import NETWORK_S, Knowledge
from replay.legs import Flight, Leg
from replay.profile import Profile
from replay.request_counts import Ledger
from replay.simworker import MODEL, PERIOD_S, SimWorker
from replay.traces import Request, chains
from services.router.admission.policy import AdmissionPolicy
from services.router.placement.placement import Placement, PlacementRequest, Policy, Rejection
from services.router.placement.slo import NO_TARGETS, Targets
from services.router.state.fleet import Fleet
from services.router.state.sent_work import Sent
from shared.contracts.inference import LegKind
from shared.contracts.workers import Role, WorkerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How many workers of each role."""

    both: int = 0
    prefill: int = 0
    decode: int = 0

    def roles(self) -> list[Role]:
        """Of all workers."""
        return [Role.BOTH] * self.both + [Role.PREFILL] * self.prefill + [Role.DECODE] * self.decode


class World:
    """A fleet and one router. Engines are told of nothing; the placer may be one that looks into them (an oracle)."""

    def __init__(self, shape: Shape, profile: Profile) -> None:
        self.now = 0.0
        self.profile = profile
        roles = shape.roles()
        made = [
            SimWorker(number, role, profile, self, offset_s=PERIOD_S * number / len(roles))
            for number, role in enumerate(roles)
        ]
        self.workers = {worker.worker_id: worker for worker in made}
        self.fleet = Fleet(Policy(silent_s_max=math.inf))
        self.ledger = Ledger()
        self.targets: Targets = NO_TARGETS
        """Said of every request."""
        self._gate: Authenticator | None = None
        self._knowledge = Knowledge(self.fleet, made)
        self._exchange = Exchange(self.workers, self.at, self._woken)
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()

    def run(self, requests: list[Request], progress: Callable[[int], None] = lambda _number: None) -> list[Flight]:
        """All of them, to the last token. ``progress`` is told how many have arrived."""
        flights = [
            Flight(number, request, chain)
            for number, (request, chain) in enumerate(zip(requests, chains(requests), strict=True))
        ]
        arriving = iter(flights)
        self._next_arrival(0.0, arriving, progress)
        due = self._due
        while due:
            self.now, _number, call, arguments = heappop(due)
            call(self.now, *arguments)
        return flights

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call it then, with the instant as its first argument."""
        heappush(self._due, (when, next(self._numbers), call, arguments))

    def _next_arrival(self, _now: float, arriving: Iterable[Flight], progress: Callable[[int], None]) -> None:
        for flight in arriving:
            self.at(flight.request.at_s, self._arrives, flight)
            self.at(flight.request.at_s, self._next_arrival, arriving, progress)
            progress(flight.number)
            break

    def join(self, worker: SimWorker) -> None:
        """One more is ready."""
        self.workers[worker.worker_id] = worker
        self._knowledge.joined(worker, self.now)
        self._ring(self.now)

    def rewrite(self, worker: SimWorker, record: WorkerRecord) -> None:
        """Its entry in the registry says something else now, such as another role or phase."""
        worker.changes(self.now)
        worker.record = record
        self.fleet.cluster.record(record, self.now)
        self._ring(self.now)

    def leave(self, worker: SimWorker) -> None:
        """Nobody needs it any more. Expects that no leg is or will be there."""
        del self.workers[worker.worker_id]
        self._knowledge.left(worker, self.now)

    def admit(self, policy: AdmissionPolicy) -> None:
        """From now on requests wait for their turn at the router, and may be refused."""
        self._gate = Authenticator(self.fleet, policy, lambda when: self.at(when, self._turn), self._decided)

    def _arrives(self, now: float, flight: Flight) -> None:
        self._knowledge.catch_up(now)
        request = flight.request
        need = PlacementRequest(
            model=MODEL, prompt_tokens=request.input_tokens, hashes=flight.chain, targets=self.targets
        )
        self.ledger.arrives(flight)
        if self._gate is None:
            self._decided(now, flight, self.fleet.place(need, now))
        else:
            self._gate.offer(flight, need, now)
            self._reported(now)

    def _reported(self, now: float) -> None:
        """While somebody waits, each worker's report is a reason to look: they come one after the other."""
        if self._gate is not None and self._gate.waiting:
            self._gate.ring(now + PERIOD_S / len(self.workers))

    def _turn(self, now: float) -> None:
        if self._gate is not None and self._gate.due(now):
            self._knowledge.catch_up(now)
            self._gate.turn(now)
            self._reported(now)

    def _decided(self, now: float, flight: Flight, placed: Placement | Rejection) -> None:
        if isinstance(placed, Rejection):
            flight.refused_at = now
            return
        flight.placed = placed
        if placed.prefill is None:
            self._start(self._leg(LegKind.AGGREGATED, flight, placed, now), now)
            return
        prefill = self._leg(LegKind.PREFILL, flight, placed, now)
        self._start(prefill, now)
        if placed.streamed:
            self._start_decode(now, prefill)

    def _leg(self, kind: LegKind, flight: Flight, placed: Placement, now: float) -> Leg:
        prefill, request = kind is LegKind.PREFILL, flight.request
        view = placed.prefill if prefill and placed.prefill is not None else placed.decode
        uncached = 0 if kind is LegKind.DECODE else placed.uncached_tokens
        job = Job(next(self._numbers), flight.chain, request.input_tokens, 1 if prefill else request.output_tokens)
        leg = Leg(
            kind,
            flight,
            self.workers[view.record.worker_id],
            job,
            Sent(now, uncached, request.input_tokens if prefill else placed.context_tokens),
            uncached,
            () if kind is LegKind.DECODE else placed.sources,
        )
        job.owner, job.fetches = leg, bool(leg.sources)
        return leg

    def _start(self, leg: Leg, now: float) -> None:
        self._knowledge.catch_up_with(leg.worker, now)
        self.fleet.cluster.leg_started(leg.worker.worker_id, leg.sent)
        self.ledger.started(leg)
        self.at(now + NETWORK_S, self._reaches_worker, leg)

    def _start_decode(self, now: float, prefill: Leg) -> None:
        flight = prefill.flight
        assert flight.placed is not None
        leg = self._leg(LegKind.DECODE, flight, flight.placed, now)
        leg.reads_from, prefill.read_by = prefill, leg
        leg.job.fetches = True
        leg.job.granted = max(0, leg.job.prompt_tokens - self.profile.tail_tokens)
        self._start(leg, now)

    def _reaches_worker(self, now: float, leg: Leg) -> None:
        worker = leg.worker
        worker.changes(now)
        worker.legs += 1
        worker.engine.add(leg.job, now)
        self._woken(worker)

    def _woken(self, worker: SimWorker) -> None:
        """Something was done with its engine."""
        if worker.engine.pool.changes:
            self._knowledge.changed(worker, self.now)
        wakes_at = worker.engine.wakes_at
        if wakes_at != worker.scheduled_at:
            worker.scheduled_at = wakes_at
            if wakes_at < math.inf:
                self.at(wakes_at, self._wake, worker)

    def _wake(self, now: float, worker: SimWorker) -> None:
        if worker.engine.wakes_at == now == worker.scheduled_at:
            worker.changes(now)
            worker.scheduled_at = math.inf
            worker.engine.wake(now)
            self._woken(worker)

    # What engines tell.

    def asks(self, _engine: Engine, job: Job, now: float) -> None:
        """A job wants KV from elsewhere."""
        self._exchange.asks(job.owner, now)

    def receives(self, _engine: Engine, job: Job, now: float) -> None:
        """Room for it is made."""
        self._exchange.receives(job.owner, now)

    def computed(self, _engine: Engine, job: Job, now: float) -> None:
        """A chunk is there, which the decode leg may be waiting for."""
        self._exchange.computed(job.owner, now)

    def first_token(self, _engine: Engine, job: Job, now: float) -> None:
        """The prompt is computed."""
        leg: Leg = job.owner
        leg.worker.prompt_finished(job)
        self._exchange.read_over(leg, now)
        if leg.kind is not LegKind.DECODE:
            leg.flight.cached_tokens, leg.flight.fetched_tokens = job.cached_tokens, job.received_tokens
        if leg.kind is not LegKind.PREFILL:
            leg.flight.first_token_at = now + NETWORK_S
        self.at(now + NETWORK_S, self._prompt_computed, leg)

    def finished(self, _engine: Engine, job: Job, now: float) -> None:
        """All of a leg is done."""
        leg: Leg = job.owner
        leg.worker.legs -= 1
        leg.flight.preemptions += job.preemptions
        if leg.kind is LegKind.PREFILL:
            self._exchange.prefill_finished(leg)
        else:
            leg.flight.finished_at = now + NETWORK_S
        self.at(now + NETWORK_S, self._ended, leg)

    def _prompt_computed(self, now: float, leg: Leg) -> None:
        self._knowledge.catch_up_with(leg.worker, now)
        self.fleet.cluster.prompt_computed(leg.worker.worker_id, leg.sent, leg.uncached_tokens)
        self.ledger.prompt_computed(leg)
        self._ring(now)

    def _ended(self, now: float, leg: Leg) -> None:
        self._knowledge.catch_up_with(leg.worker, now)
        context = leg.flight.request.input_tokens if leg.kind is LegKind.PREFILL else self._context(leg)
        self.fleet.cluster.leg_ended(leg.worker.worker_id, leg.sent, context)
        self.ledger.ended(leg)
        placed = leg.flight.placed
        if leg.kind is not LegKind.PREFILL:
            if self._gate is not None:
                self._gate.ended(leg.flight)
        elif placed is not None and not placed.streamed:
            self._start_decode(now, leg)
        self._ring(now)

    def _ring(self, now: float) -> None:
        if self._gate is not None:
            self._gate.ring(now)

    def _context(self, leg: Leg) -> int:
        assert leg.flight.placed is not None
        return leg.flight.placed.context_tokens
