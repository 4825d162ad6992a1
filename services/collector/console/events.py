"""The console's event log: worker lifecycles, planner changes, services, operators' orders, health."""

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
"""Service statuses of workers are skipped: the fleet state has the same facts with more detail."""
ENDED = (ServicePhase.STOPPED, ServicePhase.FAILED)
"""Phases after which a service sends no more statuses."""
Life = tuple[Epoch, WorkerPhase, Role]


class EventLog:
    """The newest events, and the state that is compared with the next report. Bounded."""

    def __init__(self) -> None:
        self._events: deque[EventLine] = deque(maxlen=EVENTS_MAX)
        self._lives: dict[WorkerId, Life] | None = None
        """Lives in the leader's last fleet state; None before the first."""
        self._leader = ""
        self._term = 0
        self._services: dict[tuple[str, str], ServicePhase] = {}
        self._status = ""

    def lines(self) -> list[EventLine]:
        """The newest first."""
        return list(self._events)

    def fleet_state(self, state: FleetState, at: float) -> None:
        """The leading orchestrator published the fleet."""
        if state.term < self._term:
            return
        if state.leader != self._leader:
            if self._leader:
                self._note(at, LIFECYCLE, state.leader, f"is the leader now, term {state.term}")
            self._leader = state.leader
        self._term = state.term
        before, lives = self._lives, {}
        for each in state.workers:
            lives[each.record.worker_id] = self._compare(each, before, at)
        self._lives = lives
        for worker_id, (_epoch, phase, _role) in (before or {}).items():
            if worker_id not in lives and phase not in OVER:
                self._note(at, LIFECYCLE, worker_id, "is gone")

    def worker_lost(self, lost: WorkerLost, at: float) -> None:
        life = (self._lives or {}).get(lost.worker_id)
        if life is None or life[0] > lost.epoch or life[1] is WorkerPhase.LOST or self._lives is None:
            return
        self._lives[lost.worker_id] = (life[0], WorkerPhase.LOST, life[2])
        self._note(at, LIFECYCLE, lost.worker_id, f"lost: no report for {lost.silent_s:.1f} s", ERROR)

    def worker_drained(self, report: WorkerDrained, at: float) -> None:
        level = WARNING if report.legs_cut or report.prefixes_left else INFO
        self._note(at, LIFECYCLE, report.worker_id, drained(report), level)

    def planned(self, plan: PlanDecision, at: float) -> None:
        """The planner changed something, or the outcome of a change is known."""
        if plan.action is PlanAction.NOTHING:
            return
        text = f"{plan_text(plan)}: {plan.outcome or plan.why}".rstrip(": ")
        self._note(at, PLANNER, plan.model, text)

    def service_status(self, status: ServiceStatus, at: float) -> None:
        key = (status.service, status.instance)
        if status.service == WORKER or self._services.get(key) is status.phase:
            return
        if key not in self._services and len(self._services) >= SERVICES_MAX:
            return
        self._services[key] = status.phase
        text = f"{status.service} {status.phase.value}{f': {status.detail}' if status.detail else ''}"
        self._note(at, SERVICE, status.instance, text, ERROR if status.phase is ServicePhase.FAILED else INFO)

    def services_heard(self, living: set[tuple[str, str]], at: float) -> None:
        """Only these services still publish their status."""
        for key in [key for key in self._services if key not in living]:
            if self._services.pop(key) not in ENDED:
                self._note(at, SERVICE, key[1], f"{key[0]} stopped reporting", WARNING)

    def order_given(self, subject: str, text: str, at: float, *, succeeded: bool = True) -> None:
        """An operator gave an order at this console."""
        self._note(at, ACTION, subject, text, INFO if succeeded else WARNING)

    def health_changed(self, health: Health, at: float) -> None:
        """Records an event when the status differs from the last one."""
        before, self._status = self._status, health.status
        if not before or before == health.status:
            return
        why = health.sentences[0] if health.sentences else None
        text = f"{before} → {health.status}" + (f": {why.text}" if why is not None else "")
        self._note(at, HEALTH, "system", text, why.level if why is not None else INFO)

    def _compare(self, each: FleetWorker, before: dict[WorkerId, Life] | None, at: float) -> Life:
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
            self._note(at, LIFECYCLE, worker_id, f"role {known[2].value} → {record.role.value}")
        return life

    def _note(self, at: float, kind: str, subject: str, text: str, level: str = INFO) -> None:
        line = EventLine(at=round(at, 3), level=level, kind=kind, subject=subject, text=text[:TEXT_CHARS_MAX])
        self._events.appendleft(line)
