"""The present state of the whole system, from its messages on the bus; `baton top` draws it.

Times are seconds on this process's monotonic clock. Everything is bounded.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from shared.contracts.control import ServicePhase, ServiceStatus
from shared.contracts.fleet_orders import WorkerDrained
from shared.contracts.ids import WorkerId
from shared.contracts.inference import RequestFinished
from shared.contracts.load import LoadReport, StoreState
from shared.contracts.planning import PlanAction, PlanDecision
from shared.contracts.workers import FleetState, Role, WorkerLost, WorkerPhase, WorkerRecord
from shared.text.fleet_text import loss_text, plan_text

WINDOW_S = 60
"""Window of requests and flows."""
SPEED_S = 5.0
"""Window of workers' rates."""
SILENT_S_MAX = 10.0
"""A worker without reports and record is shown for this long."""
GONE_SHOWN_S = 30.0
"""A lost worker is shown for this long."""
LOSS_EVENT_S = 60.0
"""Shortest time between two events about blocks that a store has lost."""
WORKERS_MAX = 2048
REQUESTS_MAX = 4096
EVENTS_MAX = 64
OK = 200
DIGITS = re.compile("([0-9]+)")
ROLES = (Role.PREFILL, Role.DECODE, Role.BOTH, Role.STORE)


@dataclass(slots=True)
class Worker:
    """One worker in its present epoch."""

    record: WorkerRecord
    phase: WorkerPhase
    load: LoadReport | None = None
    heard: float = 0.0
    ended: float | None = None
    """When it was lost or its record expired."""
    reports: deque[tuple[float, LoadReport]] = field(default_factory=lambda: deque(maxlen=64))
    blocks_lost: int = 0
    """Of a store: lost blocks that an event has reported."""
    next_loss_event: float = 0.0
    """No event about lost blocks before this time."""

    def per_s(self, name: str) -> float:
        """Recent growth per second of a total in its load reports."""
        if len(self.reports) < 2:
            return 0.0
        (begun, first), (ended, last) = self.reports[0], self.reports[-1]
        return float(max(0.0, getattr(last, name) - getattr(first, name)) / max(ended - begun, 1e-3))

    @property
    def kv_used(self) -> float:
        """0.0 to 1.0."""
        load = self.load
        return load.kv_blocks_used / load.kv_blocks_total if load is not None and load.kv_blocks_total else 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the event list."""

    at: float
    subject: str
    text: str
    bad: bool = False


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests of the window. Seconds; -1 when not known."""

    per_s: float
    prompt_tokens_per_s: float
    completion_tokens_per_s: float
    ttft_s: tuple[float, float]
    """Median and 95th percentile; likewise ``itl_s``."""
    itl_s: tuple[float, float]
    failed: Counter[str]
    modes: Counter[str]
    count: int


class Watch:
    """Takes messages, and holds the state to show."""

    def __init__(self, now: float) -> None:
        self.workers: dict[WorkerId, Worker] = {}
        self.requests: deque[tuple[float, RequestFinished]] = deque(maxlen=REQUESTS_MAX)
        self.events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self.leader = ""
        self.plans: dict[str, PlanDecision] = {}
        """The newest plan of each model."""
        self.services: dict[tuple[str, str], tuple[float, ServiceStatus]] = {}
        self.begun = now
        self._leader_heard_at = now

    def record(self, record: WorkerRecord, now: float) -> None:
        worker = self.workers.get(record.worker_id)
        if worker is not None and record.epoch < worker.record.epoch:
            return
        if worker is None or record.epoch > worker.record.epoch:
            if worker is None and len(self.workers) >= WORKERS_MAX:
                return
            self.workers[record.worker_id] = Worker(record, record.phase, heard=now)
            if now - self.begun > SPEED_S or worker is not None:
                again = " again" if worker is not None else ""
                self._note(now, record.worker_id, f"{record.phase.value}{again} as {record.role.value}")
            return
        self._changed(worker, record.phase, record.role, now)
        worker.record, worker.heard, worker.ended = record, now, None

    def record_removed(self, worker_id: WorkerId, now: float) -> None:
        worker = self.workers.get(worker_id)
        if worker is not None and worker.ended is None:
            worker.ended = now
            if worker.phase is not WorkerPhase.LOST:
                worker.phase = WorkerPhase.GONE
                self._note(now, worker_id, "gone")

    def load_reported(self, load: LoadReport, now: float) -> None:
        worker = self.workers.get(load.worker_id)
        if worker is None or load.epoch != worker.record.epoch:
            return
        self._changed(worker, load.phase, load.role, now)
        worker.load, worker.heard, worker.ended = load, now, None
        worker.reports.append((now, load))
        if load.store is not None:
            self._note_losses(worker, load.store, now)
        while len(worker.reports) > 2 and worker.reports[1][0] <= now - SPEED_S:
            worker.reports.popleft()

    def worker_lost(self, lost: WorkerLost, now: float) -> None:
        worker = self.workers.get(lost.worker_id)
        if worker is not None and worker.record.epoch <= lost.epoch and worker.phase is not WorkerPhase.LOST:
            worker.phase, worker.ended = WorkerPhase.LOST, now
            self._note(now, lost.worker_id, f"lost: no report for {lost.silent_s:.1f} s", bad=True)

    def worker_drained(self, report: WorkerDrained, now: float) -> None:
        text = f"drained in {report.seconds:.1f} s, {report.legs} requests"
        text += f" ({report.legs_cut} continued elsewhere)" if report.legs_cut else ""
        text += f", {report.prefixes} prefixes moved" if report.prefixes else ""
        self._note(now, report.worker_id, text, bad=report.legs_cut > 0)

    def fleet_state(self, state: FleetState, now: float) -> None:
        """The leading orchestrator published the fleet."""
        if state.leader != self.leader:
            if self.leader:
                self._note(now, state.leader, f"is the leader now, term {state.term}")
            self.leader = state.leader
        self._leader_heard_at = now
        for each in state.workers:
            if each.record.worker_id not in self.workers and each.phase not in (WorkerPhase.GONE, WorkerPhase.LOST):
                self.record(each.record, now)

    def planned(self, plan: PlanDecision, now: float) -> None:
        self.plans[plan.model] = plan
        if plan.action is not PlanAction.NOTHING:
            self._note(now, "planner", f"{plan_text(plan)}: {plan.why}" if plan.why else plan_text(plan))

    def finished(self, requests: Iterable[RequestFinished], now: float) -> None:
        for request in requests:
            self.requests.append((now, request))

    def service_status(self, status: ServiceStatus, now: float) -> None:
        if len(self.services) < WORKERS_MAX or (status.service, status.instance) in self.services:
            self.services[status.service, status.instance] = (now, status)

    def tick(self, now: float) -> None:
        """Drop requests, workers and services that are too old."""
        while self.requests and self.requests[0][0] < now - WINDOW_S:
            self.requests.popleft()
        for worker_id, worker in list(self.workers.items()):
            silent = now - worker.heard > SILENT_S_MAX
            if worker.ended is not None and silent and now - worker.ended > GONE_SHOWN_S:
                del self.workers[worker_id]
        self.services = {key: one for key, one in self.services.items() if now - one[0] < SILENT_S_MAX}
        if self.leader and now - self._leader_heard_at > SILENT_S_MAX:
            self.leader = ""
            self._note(now, "orchestrator", "no leader", bad=True)

    def health(self, *, connected: bool) -> str:
        """healthy, degraded or unhealthy: unhealthy means that no request can be served. A request wakes engines that
        sleep, so they count as ready while no other is.
        """
        engines = [one for one in self.workers.values() if one.record.role is not Role.STORE and one.ended is None]
        sleeps = all(one.phase is WorkerPhase.ASLEEP for one in engines)
        able = WorkerPhase.ASLEEP if sleeps else WorkerPhase.READY
        roles = {one.record.role for one in self.workers.values() if one.phase is able}
        ready = {
            name for (name, _instance), (_at, status) in self.services.items() if status.phase is ServicePhase.READY
        }
        if not connected or "router" not in ready or not roles - {Role.STORE}:
            return "unhealthy"
        both_phases = roles & {Role.PREFILL, Role.BOTH} and roles & {Role.DECODE, Role.BOTH}
        has_lost = any(one.phase is WorkerPhase.LOST for one in self.workers.values())
        has_warning = any(status.warning for _at, status in self.services.values())
        return "healthy" if self.leader and both_phases and not (has_lost or has_warning) else "degraded"

    def counts(self) -> list[tuple[Role, int, int]]:
        """For each role with workers: the number of ready and of live ones."""
        live = [one for one in self.workers.values() if one.phase not in (WorkerPhase.GONE, WorkerPhase.LOST)]
        counts = []
        for role in ROLES:
            of_role = [one for one in live if one.record.role is role]
            if of_role:
                counts.append((role, sum(one.phase is WorkerPhase.READY for one in of_role), len(of_role)))
        return counts

    def ordered(self) -> list[Worker]:
        """By role, then by id; numbers within ids sort as numbers."""
        key = {role: number for number, role in enumerate(ROLES)}
        return sorted(self.workers.values(), key=lambda one: (key[one.record.role], _natural(one.record.worker_id)))

    def traffic(self, now: float) -> Traffic:
        """Of the window, or since the start if that is shorter."""
        requests = [request for _at, request in self.requests]
        seconds = max(1.0, min(float(WINDOW_S), now - self.begun))
        if len(self.requests) == REQUESTS_MAX:
            seconds = max(1e-3, now - self.requests[0][0])
        return Traffic(
            per_s=len(requests) / seconds,
            prompt_tokens_per_s=sum(max(0, one.prompt_tokens) for one in requests) / seconds,
            completion_tokens_per_s=sum(max(0, one.completion_tokens) for one in requests) / seconds,
            ttft_s=_spread([one.ttft_s for one in requests if one.ttft_s >= 0]),
            itl_s=_spread([one.itl_s for one in requests if one.itl_s >= 0]),
            failed=Counter(one.reason or str(one.status) for one in requests if one.status >= 500 or one.status == 429),
            modes=Counter(one.mode for one in requests if one.status == OK),
            count=len(requests),
        )

    def each_second(self, now: float, seconds: int) -> list[int]:
        """Requests that ended in each of the last seconds, oldest first, without the present second."""
        counts = Counter(int(now) - int(at) for at, _request in self.requests)
        return [counts[ago] for ago in range(seconds, 0, -1)]

    def flows(self) -> list[tuple[str, str, int, int]]:
        """Prefill worker (empty: the decode worker), decode worker, number of requests, bytes of KV."""
        count: Counter[tuple[str, str]] = Counter()
        size: Counter[tuple[str, str]] = Counter()
        for _at, request in self.requests:
            if request.status == OK and request.decode_worker:
                pair = request.prefill_worker, request.decode_worker
                count[pair] += 1
                size[pair] += request.received_bytes
        return [(*pair, many, size[pair]) for pair, many in sorted(count.items(), key=lambda one: (-one[1], one[0]))]

    def _changed(self, worker: Worker, phase: WorkerPhase, role: Role, now: float) -> None:
        if phase is not worker.phase:
            self._note(now, worker.record.worker_id, f"{worker.phase.value} → {phase.value}")
            worker.phase = phase
        if role is not worker.record.role:
            self._note(now, worker.record.worker_id, f"role {worker.record.role.value} → {role.value}")
            # The load report and the registry may show the new role in either order.
            worker.record = msgspec.structs.replace(worker.record, role=role)

    def _note_losses(self, worker: Worker, store: StoreState, now: float) -> None:
        lost = store.damaged_blocks_total + store.unsaved_blocks_total
        if lost > worker.blocks_lost and now >= worker.next_loss_event:
            worker.blocks_lost, worker.next_loss_event = lost, now + LOSS_EVENT_S
            self._note(now, worker.record.worker_id, loss_text(store), bad=True)

    def _note(self, now: float, subject: str, text: str, *, bad: bool = False) -> None:
        self.events.append(Event(now, subject, text, bad))


def _spread(values: list[float]) -> tuple[float, float]:
    if not values:
        return -1.0, -1.0
    values.sort()
    return values[len(values) // 2], values[min(len(values) - 1, int(0.95 * len(values)))]


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in DIGITS.split(name) if part]
