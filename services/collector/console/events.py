"""What happened lately, in words: workers' lives, the planner, services, operators' orders, health."""

from __future__ import annotations

from collections import deque

from services.collector.console.views import ERROR, INFO, WARNING, EventLine, Health
from shared.contracts.control import ServicePhase, ServiceStatus
from shared.contracts.fleet_orders import WorkerDrained
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.planning import PlanAction, PlanDecision
from shared.contracts.workers import FleetState, FleetWorker, Role, WorkerLost, WorkerPhase
from shared.text.fleet_text import drained, plan_text

EVENTS_MAX = 200
SERVICES_MAX = 1024
TEXT_CHARS_MAX = 500
LIFECYCLE, PLANNER, SERVICE, ACTION, HEALTH = "lifecycle", "planner", "service", "action", "health"
OVER = (WorkerPhase.GONE, WorkerPhase.LOST)
WORKER = "worker"
"""What a worker says of itself as a process, the fleet tells better."""
LEVELS = {ServicePhase.FAILED: ERROR}
ENDED = (ServicePhase.STOPPED, ServicePhase.FAILED)
"""Who said this speaks no more."""
Life = tuple[Epoch, WorkerPhase, Role]


class Happenings:
    """The newest of them, and what must be known to notice the next. Bounded."""

    def __init__(self) -> None:
        self._events: deque[EventLine] = deque(maxlen=EVENTS_MAX)
        self._lives: dict[WorkerId, Life] | None = None
        """As the leader told last; None: nobody has told yet."""
        self._leader = ""
        self._term = 0
        self._services: dict[tuple[str, str], ServicePhase] = {}
        self._status = ""

    def lines(self) -> list[EventLine]:
        """The newest first."""
        return list(self._events)

    def fleet_told(self, state: FleetState, at: float) -> None:
        """The leading orchestrator says who is there."""
        if state.term < self._term:
            return
        if state.leader != self._leader:
            if self._leader:
                self._note(at, LIFECYCLE, state.leader, f"leads now, term {state.term}")
            self._leader = state.leader
        self._term = state.term
        before, lives = self._lives, {}
        for each in state.workers:
            lives[each.record.worker_id] = self._lived(each, before, at)
        self._lives = lives
        for worker_id, (_epoch, phase, _role) in (before or {}).items():
            if worker_id not in lives and phase not in OVER:
                self._note(at, LIFECYCLE, worker_id, "is gone")

    def worker_lost(self, lost: WorkerLost, at: float) -> None:
        """The orchestrator gave it up."""
        life = (self._lives or {}).get(lost.worker_id)
        if life is None or life[0] > lost.epoch or life[1] is WorkerPhase.LOST or self._lives is None:
            return
        self._lives[lost.worker_id] = (life[0], WorkerPhase.LOST, life[2])
        self._note(at, LIFECYCLE, lost.worker_id, f"lost: silent for {lost.silent_s:.1f} s", ERROR)

    def worker_drained(self, told: WorkerDrained, at: float) -> None:
        """A worker has left in order."""
        level = WARNING if told.legs_cut or told.prefixes_left else INFO
        self._note(at, LIFECYCLE, told.worker_id, drained(told), level)

    def planned(self, plan: PlanDecision, at: float) -> None:
        """The planner did something, or what it did has come to something."""
        if plan.action is PlanAction.NOTHING:
            return
        words = f"{plan_text(plan)}: {plan.outcome or plan.why}".rstrip(": ")
        self._note(at, PLANNER, plan.model, words)

    def service_told(self, status: ServiceStatus, at: float) -> None:
        """A process says where it is."""
        key = (status.service, status.instance)
        if status.service == WORKER or self._services.get(key) is status.phase:
            return
        if key not in self._services and len(self._services) >= SERVICES_MAX:
            return
        self._services[key] = status.phase
        words = f"{status.service} {status.phase.value}{f': {status.detail}' if status.detail else ''}"
        self._note(at, SERVICE, status.instance, words, LEVELS.get(status.phase, INFO))

    def services_heard(self, living: set[tuple[str, str]], at: float) -> None:
        """Only these still speak."""
        for key in [key for key in self._services if key not in living]:
            if self._services.pop(key) not in ENDED:
                self._note(at, SERVICE, key[1], f"{key[0]} fell silent", WARNING)

    def acted(self, subject: str, words: str, at: float, *, well: bool = True) -> None:
        """An operator gave an order here."""
        self._note(at, ACTION, subject, words, INFO if well else WARNING)

    def health_changed(self, health: Health, at: float) -> None:
        """How the system is; told when that is another than before."""
        before, self._status = self._status, health.status
        if not before or before == health.status:
            return
        why = health.sentences[0] if health.sentences else None
        words = f"{before} → {health.status}" + (f": {why.text}" if why is not None else "")
        self._note(at, HEALTH, "system", words, why.level if why is not None else INFO)

    def _lived(self, each: FleetWorker, before: dict[WorkerId, Life] | None, at: float) -> Life:
        record, worker_id = each.record, each.record.worker_id
        life = (record.epoch, each.phase, record.role)
        if before is None:
            return life
        known = before.get(worker_id)
        if known is None or known[0] < record.epoch:
            again = " again" if known is not None else ""
            note = f" ({record.note})" if record.note else ""
            self._note(at, LIFECYCLE, worker_id, f"{each.phase.value}{again} as {record.role.value}{note}")
            return life
        if known[1] is not each.phase:
            level = ERROR if each.phase is WorkerPhase.LOST else INFO
            note = f": {record.note}" if record.note else ""
            self._note(at, LIFECYCLE, worker_id, f"{known[1].value} → {each.phase.value}{note}", level)
        if known[2] is not record.role:
            self._note(at, LIFECYCLE, worker_id, f"is {record.role.value} now, was {known[2].value}")
        return life

    def _note(self, at: float, kind: str, subject: str, text: str, level: str = INFO) -> None:
        line = EventLine(at=round(at, 3), level=level, kind=kind, subject=subject, text=text[:TEXT_CHARS_MAX])
        self._events.appendleft(line)
