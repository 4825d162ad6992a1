"""Event loop of the replay in virtual time: arrivals, placement, engines, tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from types import MappingProxyType
from typing import Any

from replay.engine import Engine, Job
from replay.legs import At, Exchange, Leg, ReplayedRequest
from replay.profile import Profile
from replay.router import NETWORK_S, Knowledge, RouterQueue, VirtualAdmission
from replay.simworker import MODEL, PERIOD_S, SimWorker
from replay.split import Split
from replay.tier import SimStore, Tier
from replay.traces import Request, chains
from services.router.admission.policy import AdmissionPolicy
from services.router.placement.fleet import Fleet
from services.router.placement.placement import Placement, PlacementPolicy, PlacementRequest, Rejection
from services.router.placement.slo import NO_TARGETS, Targets
from services.router.state.worker_view import Sent
from shared.contracts.ids import WorkerId
from shared.contracts.inference import LegKind
from shared.contracts.workers import Role

NOISE_SEEDS = 4096
"""More workers than any fleet has: no two runs share a worker's noise."""


class World:
    """A fleet and one router. Only an oracle placer reads the engines' state directly."""

    worker_type: type[SimWorker] = SimWorker

    def __init__(
        self,
        split: Split,
        profile: Profile,
        *,
        by_role: Mapping[Role, Profile] = MappingProxyType({}),
        slow: Mapping[int, float] = MappingProxyType({}),
        seed: int = 0,
        host_memory_bytes: int = 0,
    ) -> None:
        """``by_role``: engines of a role that are not as ``profile``. ``slow``: speeds of some workers by number, 1.0
        being the profile's. ``seed``: of the engines' noise. ``host_memory_bytes``: memory of a store on each host; 0:
        none.
        """
        if host_memory_bytes and (profile.groups != "full" or profile.host_blocks):
            raise ValueError("stores are simulated for models with full attention alone, without --host-blocks")
        self.now = 0.0
        self.profile = profile
        roles = split.roles()
        made = [
            self.worker_type(
                number, role, own, self, offset_s=PERIOD_S * number / len(roles), has_store=host_memory_bytes > 0
            )
            for number, role in enumerate(roles)
            for given in [by_role.get(role, profile)]
            for own in [
                replace(given, speed=given.speed * slow.get(number, 1.0), noise_seed=seed * NOISE_SEEDS + number)
            ]
        ]
        self.workers = {worker.worker_id: worker for worker in made}
        self.fleet = Fleet(PlacementPolicy(silent_s_max=math.inf))
        self.targets: Targets = NO_TARGETS
        """Targets of every request."""
        self._admission: RouterQueue | None = None
        self._knowledge = Knowledge(self.fleet, made)
        stores: dict[WorkerId, SimStore] = {}
        self._exchange = Exchange(self.workers, stores, self.at, self._woken)
        self.tier: Tier | None = None
        if host_memory_bytes:
            self.tier = Tier(
                made, host_memory_bytes, self.at, lambda: self.now, self._exchange, self._knowledge.changed
            )
            stores.update(self.tier.stores)
            for store in stores.values():
                self._knowledge.joined(store, 0.0)
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()
        self._following: dict[int, ReplayedRequest] = {}
        """In a closed loop, the session's next request by the number of the one before."""
        self._progress: Callable[[int], None] = lambda _number: None
        self._arrived = count()

    def run(
        self, requests: list[Request], progress: Callable[[int], None] = lambda _number: None
    ) -> list[ReplayedRequest]:
        """Replay all requests to the last token; ``progress`` is called with the number of arrivals before each.

        In a closed loop a refused turn ends at once, and the session goes on with its next turn: so every policy gets
        the same requests. The outcomes are in the order of ``requests``.
        """
        outcomes = [
            ReplayedRequest(number, request, chain)
            for number, (request, chain) in enumerate(zip(requests, chains(requests), strict=True))
        ]
        self._progress, self._arrived = progress, count()
        first = []
        latest: dict[int, ReplayedRequest] = {}
        for replayed in outcomes:
            request = replayed.request
            if request.gap_s is not None and request.session in latest:
                self._following[latest[request.session].number] = replayed
            else:
                first.append(replayed)
            latest[request.session] = replayed
        self._next_arrival(0.0, iter(sorted(first, key=lambda replayed: replayed.request.at_s)))
        due, tier = self._due, self.tier
        if tier is not None:
            tier.begin()
        while len(due) > (0 if tier is None else tier.sleeping):
            self.now, _number, call, arguments = heappop(due)
            call(self.now, *arguments)
        return outcomes

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        """Schedule ``call(when, *arguments)``."""
        heappush(self._due, (when, next(self._numbers), call, arguments))

    def _next_arrival(self, _now: float, arriving: Iterator[ReplayedRequest]) -> None:
        replayed = next(arriving, None)
        if replayed is not None:
            self.at(replayed.request.at_s, self._arrives, replayed)
            self.at(replayed.request.at_s, self._next_arrival, arriving)

    def _next_turn(self, ended: ReplayedRequest, now: float) -> None:
        """Schedule the turn that a closed-loop session sends after this one."""
        replayed = self._following.pop(ended.number, None)
        if replayed is not None:
            assert replayed.request.gap_s is not None
            replayed.request = replace(replayed.request, at_s=now + replayed.request.gap_s)
            self.at(replayed.request.at_s, self._arrives, replayed)

    def ignore_speeds(self) -> None:
        """The policy does not read the learned speeds of engines: nobody learns them, which saves time."""
        self._knowledge.ignore_speeds()

    def admit(self, policy: AdmissionPolicy) -> None:
        """Turn admission on: requests may wait in the router or be rejected."""
        self.queue(lambda at, decided: VirtualAdmission(self.fleet, policy, at, decided))

    def queue(self, make: Callable[[At, Callable[..., None]], RouterQueue]) -> None:
        """Put a queue in front of placement; ``make`` gets how to schedule a pass and whom to tell of decisions."""
        self._admission = make(lambda when: self.at(when, self._run_pass), self._decided)

    def _arrives(self, now: float, replayed: ReplayedRequest) -> None:
        self._progress(next(self._arrived))
        self._knowledge.catch_up(now)
        request = replayed.request
        hashes = replayed.chain[: len(request.blocks)]
        wanted = PlacementRequest(model=MODEL, prompt_tokens=request.input_tokens, hashes=hashes, targets=self.targets)
        if self._admission is None:
            self._decided(now, replayed, self.fleet.place(wanted, now))
        else:
            self._admission.offer(replayed, wanted, now)
            self._reported(now)

    def _reported(self, now: float) -> None:
        """While requests wait, each report triggers a scheduling pass; reports are spread over the period."""
        if self._admission is not None and self._admission.waiting:
            self._admission.schedule_pass(now + PERIOD_S / len(self.workers))

    def _run_pass(self, now: float) -> None:
        if self._admission is not None and self._admission.due(now):
            self._knowledge.catch_up(now)
            self._admission.run_pass(now)
            self._reported(now)

    def _decided(self, now: float, replayed: ReplayedRequest, placement: Placement | Rejection) -> None:
        if isinstance(placement, Rejection):
            replayed.refused_at = now
            self._next_turn(replayed, now)
            return
        replayed.placement, replayed.placed_at = placement, now
        if placement.prefill is None:
            self._start(self._leg(LegKind.AGGREGATED, replayed, placement, now), now)
            return
        prefill = self._leg(LegKind.PREFILL, replayed, placement, now)
        self._start(prefill, now)
        if placement.streamed:
            self._start_decode(now, prefill)

    def _leg(self, kind: LegKind, replayed: ReplayedRequest, placement: Placement, now: float) -> Leg:
        prefill, request = kind is LegKind.PREFILL, replayed.request
        view = placement.prefill if prefill and placement.prefill is not None else placement.decode
        uncached = 0 if kind is LegKind.DECODE else placement.uncached_tokens
        hashes = replayed.chain[: len(request.blocks)]
        tokens = request.input_tokens if prefill else placement.context_tokens
        context = max(0, tokens - self.fleet.cluster.shared_tokens(view.record.worker_id, hashes))
        job = Job(next(self._numbers), replayed.chain, request.input_tokens, 1 if prefill else request.output_tokens)
        leg = Leg(
            kind,
            replayed,
            self.workers[view.record.worker_id],
            job,
            Sent(now, uncached, context, hashes=hashes),
            uncached,
            context,
            () if kind is LegKind.DECODE else placement.sources,
        )
        job.owner, job.fetches = leg, bool(leg.sources)
        return leg

    def _start(self, leg: Leg, now: float) -> None:
        self._knowledge.catch_up_with(leg.worker, now)
        self.fleet.cluster.leg_started(leg.worker.worker_id, leg.sent)
        self.at(now + NETWORK_S, self._reaches_worker, leg)

    def _start_decode(self, now: float, prefill: Leg) -> None:
        replayed = prefill.replayed
        assert replayed.placement is not None
        leg = self._leg(LegKind.DECODE, replayed, replayed.placement, now)
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
        """Publish cache changes and reschedule the engine's wake-up."""
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

    # Callbacks of engines (see ``engine.Listener``).

    def asks(self, _engine: Engine, job: Job, now: float) -> None:
        """A job requests KV of other workers."""
        self._exchange.asks(job.owner, now)

    def receives(self, _engine: Engine, job: Job, now: float) -> None:
        """Its blocks are reserved."""
        self._exchange.receives(job.owner, now)

    def computed(self, _engine: Engine, job: Job, now: float) -> None:
        """A chunk is computed; the decode leg may read it."""
        self._exchange.computed(job.owner, now)

    def first_token(self, _engine: Engine, job: Job, now: float) -> None:
        """The prompt is computed."""
        leg: Leg = job.owner
        leg.worker.prompt_finished(job)
        self._exchange.read_over(leg, now)
        if leg.kind is not LegKind.DECODE:
            leg.replayed.cached_tokens = job.cached_tokens + job.loaded_tokens
            leg.replayed.fetched_tokens = job.received_tokens
            leg.replayed.tier_tokens = min(leg.tier_tokens + leg.far_tokens, job.received_tokens)
        if leg.kind is not LegKind.PREFILL:
            leg.replayed.first_token_at = now + NETWORK_S
        self.at(now + NETWORK_S, self._prompt_computed, leg)

    def finished(self, _engine: Engine, job: Job, now: float) -> None:
        """A leg has ended."""
        leg: Leg = job.owner
        leg.worker.legs -= 1
        if leg.worker.offers is not None:
            leg.worker.offers.note(job, now)
        leg.replayed.preemptions += job.preemptions
        if leg.kind is LegKind.PREFILL:
            self._exchange.prefill_finished(leg)
        else:
            leg.replayed.finished_at = now + NETWORK_S
        self.at(now + NETWORK_S, self._ended, leg)

    def _prompt_computed(self, now: float, leg: Leg) -> None:
        self._knowledge.catch_up_with(leg.worker, now)
        self.fleet.cluster.prompt_computed(leg.worker.worker_id, leg.sent, leg.uncached_tokens)
        self._schedule_pass(now)

    def _ended(self, now: float, leg: Leg) -> None:
        self._knowledge.catch_up_with(leg.worker, now)
        self.fleet.cluster.leg_ended(leg.worker.worker_id, leg.sent, leg.context_tokens)
        placement = leg.replayed.placement
        if leg.kind is not LegKind.PREFILL:
            self._next_turn(leg.replayed, now)
            if self._admission is not None:
                self._admission.ended(leg.replayed)
        elif placement is not None and not placement.streamed:
            self._start_decode(now, leg)
        self._schedule_pass(now)

    def _schedule_pass(self, now: float) -> None:
        if self._admission is not None:
            self._admission.schedule_pass(now)
