"""The system's health: its status, the findings behind it, and what to do about each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from services.collector.console.tables import SILENT_S_MIN
from services.collector.console.traffic import LastMinute
from services.collector.console.views import (
    DEGRADED,
    ERROR,
    HEALTHY,
    INFO,
    UNHEALTHY,
    WARNING,
    Health,
    Sentence,
    WorkerCard,
)
from services.collector.metrics.fleet_metrics import STALE_S_MAX, FleetMetrics
from shared.contracts.control import DISK_MIN, ServicePhase, ServiceStatus
from shared.contracts.failures import Reason
from shared.contracts.workers import Role, WorkerPhase
from shared.text.fleet_text import many
from shared.text.formats import in_bytes

SENTENCES_MAX = 12
NAMED_MAX = 4
"""Workers that one sentence names; it counts the rest."""
FULL = 0.95
"""Share of a worker's KV memory above which requests wait for free blocks."""
REQUESTS_MIN = 10
"""With fewer requests per minute, shares are noise."""
FAILED_SHARE_DEGRADED, FAILED_SHARE_UNHEALTHY = 0.01, 0.1
LATE_SHARE_MAX = 0.1
READY = WorkerPhase.READY.value
ASLEEP = WorkerPhase.ASLEEP.value
PREFILL = {Role.PREFILL.value, Role.BOTH.value}
DECODE = {Role.DECODE.value, Role.BOTH.value}
ENDED = {WorkerPhase.GONE.value, WorkerPhase.LOST.value}
MORE = "Add workers (`baton up --join`), or let the planner do it (`baton up --workers-max N`)."
RANK = {ERROR: 0, WARNING: 1, INFO: 2}
REMEDIES = {
    Reason.NO_WORKER.value: "Start workers of the missing roles: `baton workers` lists those that run.",
    Reason.WORKER_LOST.value: "See the logs of the workers that were lost.",
    Reason.ENGINE_DEAD.value: "See the log of the worker whose engine died. A common cause is memory.",
    Reason.QUARANTINED.value: "See the router's log for the requests that engines died of.",
    Reason.DEADLINE.value: "First tokens exceed ROUTER_REQUEST_S_MAX, or engines stall: open a slow one below.",
    Reason.BUS_DOWN.value: "Check that NATS runs and that routers reach it.",
    Reason.FRAMES_LOST.value: "Routers or NATS cannot keep up with the workers: check their CPU load.",
}
"""What to do, by the most frequent failure reason."""
OPEN_ONE = "Open one of them below: its decision shows what happened."


def health_of(
    metrics: FleetMetrics, cards: list[WorkerCard], minute: LastMinute, now: float, *, connected: bool
) -> Health:
    """Status and findings, the worst first."""
    if not connected:
        lost = "The collector cannot reach NATS: this page shows an old state."
        return Health(status=UNHEALTHY, sentences=[Sentence(ERROR, lost, "Check that NATS runs.")])
    findings = [*_services(metrics), *_workers(cards), *_roles(cards), *_requests(minute, now)]
    worst = min((RANK[one.level] for one in findings), default=RANK[INFO])
    if worst == RANK[INFO]:
        findings.insert(0, _all_healthy(cards))
    ordered = sorted(findings, key=lambda one: RANK[one.level])
    status = {RANK[ERROR]: UNHEALTHY, RANK[WARNING]: DEGRADED}.get(worst, HEALTHY)
    return Health(status=status, sentences=ordered[:SENTENCES_MAX])


def _all_healthy(cards: list[WorkerCard]) -> Sentence:
    ready = sum(card.phase == READY for card in cards)
    return Sentence(INFO, f"{many(ready, 'worker')} ready.")


def _services(metrics: FleetMetrics) -> Iterator[Sentence]:
    statuses = [status for status, _heard in metrics.services.values()]
    yield from _disks(statuses)
    for status in statuses:
        if status.phase is ServicePhase.FAILED:
            text = f"{status.service} {status.instance} has failed: {status.detail or 'see its log'}."
            yield Sentence(ERROR, text, "See its log, and start it again.")
        elif status.warning:
            text = f"{status.service} {status.instance} is degraded: {status.warning}."
            yield Sentence(WARNING, text, "`baton doctor` checks the usual causes.")
    if not any(status.service == "router" and status.phase is ServicePhase.READY for status in statuses):
        yield Sentence(ERROR, "No router is ready: clients get no replies.", "Start one, or see its log.")
    if metrics.fleet.state is None:
        text = f"No orchestrator for {STALE_S_MAX:g} s: requests are served, but no process detects lost workers."
        yield Sentence(WARNING, text, "Start one, or see its log.")


def _disks(statuses: list[ServiceStatus]) -> Iterator[Sentence]:
    """File systems with almost no space; processes of one host that report the same one count once."""
    full = {(status.host, disk.folder): disk for status in statuses for disk in status.disks if disk.is_below(DISK_MIN)}
    for (host, folder), disk in full.items():
        free, size = in_bytes(disk.free_bytes), in_bytes(disk.size_bytes)
        text = f"The disk of {folder.value} on {host} is full: {free} of {size} are free. Requests are still served."
        yield Sentence(WARNING, text, "Free space there: logs are lost, and nothing can be started.")


def _workers(cards: list[WorkerCard]) -> Iterator[Sentence]:
    living = [card for card in cards if card.phase not in ENDED]
    for card in living:
        if card.heard_s_ago >= SILENT_S_MIN:
            text = f"{card.id} has sent no report for {card.heard_s_ago} s; requests go to other workers."
            yield Sentence(WARNING, text, "If it does not report again, see its log.")
    if lost := [card.id for card in cards if card.phase == WorkerPhase.LOST.value]:
        text = f"Lost within the last minute: {_named(lost)}."
        yield Sentence(WARNING, text, "Its log says why; `baton up --join` adds a worker.")
    if full := [card.id for card in living if card.kv_used >= FULL and card.waiting]:
        text = f"The KV memory of {_named(full)} is full, and requests wait for free blocks there."
        yield Sentence(WARNING, text, MORE)
    for phase in (WorkerPhase.STARTING, WorkerPhase.PROBING, WorkerPhase.DRAINING):
        if some := [card for card in living if card.phase == phase.value]:
            note = f" ({some[0].note})" if len(some) == 1 and some[0].note else ""
            yield Sentence(INFO, f"{_named([card.id for card in some])}: {phase.value}{note}.")


def _roles(cards: list[WorkerCard]) -> Iterator[Sentence]:
    """For each model, whether its workers can serve it."""
    engines = [card for card in cards if card.phase not in ENDED and card.role != Role.STORE.value]
    if not engines:
        action = "Start one: `baton up --join --both 1`."
        yield Sentence(ERROR, "There are no workers: nothing can be served.", action)
    by_model = _by_model(engines)
    for model, workers in sorted(by_model.items()):
        if all(card.phase == ASLEEP for card in workers):
            text = f"{model or 'The model'} is asleep; a request wakes it."
            yield Sentence(INFO, text)
            continue
        yield from _roles_of(f" of {model}" if len(by_model) > 1 else "", workers)


def _by_model(engines: list[WorkerCard]) -> dict[str, list[WorkerCard]]:
    by_model: dict[str, list[WorkerCard]] = {}
    for card in engines:
        by_model.setdefault(card.model, []).append(card)
    if len(by_model) > 1:
        by_model.pop("", None)  # Workers whose record is not known yet.
    return by_model


def _roles_of(model: str, workers: list[WorkerCard]) -> Iterator[Sentence]:
    """``model``: names it in a sentence; empty if there is only one."""
    ready = Counter(card.role for card in workers if card.phase == READY)
    prefilling, decoding = sum(ready[role] for role in PREFILL), sum(ready[role] for role in DECODE)
    if not prefilling and not decoding:
        what = "requests for it get 503" if model else "nothing can be served yet"
        yield Sentence(ERROR, f"No worker{model} is ready: {what}.", "See their phases below.")
    elif not prefilling or not decoding:
        missing, there = ("prefill", "decode") if not prefilling else ("decode", "prefill")
        text = f"No {missing} worker{model} is ready: {there} workers compute both phases until one is."
        yield Sentence(
            WARNING, text, f"`baton role ID {missing}` changes a worker's role, `baton up --join` adds a worker."
        )


def _requests(minute: LastMinute, now: float) -> Iterator[Sentence]:
    requests, failed, late = minute.requests(now), minute.failed(now), minute.late(now)
    of_all = f"of {many(requests, 'request')}"
    if failed:
        reason = minute.most_frequent_reason(now)
        share = failed / max(1, requests)
        unhealthy = share > FAILED_SHARE_UNHEALTHY and requests >= REQUESTS_MIN
        level = ERROR if unhealthy else WARNING if share > FAILED_SHARE_DEGRADED else INFO
        text = f"In the last minute {failed} {of_all} failed, most often with {reason}."
        yield Sentence(level, text, REMEDIES.get(reason, OPEN_ONE))
    if refused := minute.refused(now):
        text = f"In the last minute {refused} {of_all} were refused because all workers were busy."
        yield Sentence(WARNING, text, MORE)
    if requests >= REQUESTS_MIN and late > LATE_SHARE_MAX * requests:
        text = f"In the last minute {late} {of_all} missed their targets."
        yield Sentence(WARNING, text, f"The timings of a slow request, below, show where the time goes. {MORE}")


def _named(ids: Iterable[str]) -> str:
    listed = sorted(ids)
    more = len(listed) - NAMED_MAX
    return ", ".join(listed[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
