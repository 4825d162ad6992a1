"""How the system is, in sentences for a person, and what that person might do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from services.collector.console.traffic import LastMinute
from services.collector.console.views import (
    ERROR,
    ILL,
    INFO,
    STRAINED,
    WARNING,
    WELL,
    Health,
    Sentence,
    WorkerCard,
)
from services.collector.console.workers import SILENT_S_MIN
from services.collector.metrics.fleet_metrics import STALE_S_MAX, Ledger
from shared.contracts.control import ServicePhase
from shared.contracts.failures import Reason
from shared.contracts.workers import Role, WorkerPhase
from shared.text.fleet_text import many

SENTENCES_MAX = 12
NAMED_MAX = 4
"""Workers that one sentence names; the others it counts."""
FULL = 0.95
"""Of a worker's KV memory: from here on requests wait for room."""
REQUESTS_MIN = 10
"""With fewer of them in a minute, shares say little."""
FAILED_SHARE_MAX, FAILED_SHARE_ILL = 0.01, 0.1
LATE_SHARE_MAX = 0.1
READY = WorkerPhase.READY.value
COMPUTE = {Role.PREFILL.value, Role.BOTH.value}
ANSWER = {Role.DECODE.value, Role.BOTH.value}
ENDED = {WorkerPhase.GONE.value, WorkerPhase.LOST.value}
MORE = "Add workers (`baton up --join`), or let the planner do it (`baton up --workers-max N`)."
RANK = {ERROR: 0, WARNING: 1, INFO: 2}
BROKEN = {
    Reason.NO_WORKER.value: "Start workers of the roles that are missing: `baton workers` lists those that are there.",
    Reason.WORKER_LOST.value: "See the logs of the workers that were lost.",
    Reason.ENGINE_DEAD.value: "See the log of the worker whose engine died: memory is the usual reason.",
    Reason.DEADLINE.value: "Requests take longer than ROUTER_REQUEST_S_MAX allows: look at a slow one below.",
    Reason.BUS_DOWN.value: "See whether NATS runs and whether routers reach it.",
    Reason.FRAMES_LOST.value: "Routers or NATS are too slow for what workers send: see their load.",
}
"""What to do, by the most frequent reason."""
LOOK = "Open one of them below: its decision says what happened."


def health_of(ledger: Ledger, cards: list[WorkerCard], minute: LastMinute, now: float, *, connected: bool) -> Health:
    """All that is to be said, the worst first."""
    if not connected:
        lost = "NATS cannot be reached from here: what is shown is old."
        return Health(status=ILL, sentences=[Sentence(level=ERROR, text=lost, do="See whether NATS runs.")])
    said = [
        *_services(ledger),
        *_workers(cards),
        *_roles(cards),
        *_requests(minute, now),
    ]
    worst = min((RANK[one.level] for one in said), default=RANK[INFO])
    if worst == RANK[INFO]:
        said.insert(0, _all_well(cards, minute, now))
    ordered = sorted(said, key=lambda one: RANK[one.level])
    status = {RANK[ERROR]: ILL, RANK[WARNING]: STRAINED}.get(worst, WELL)
    return Health(status=status, sentences=list(islice(ordered, SENTENCES_MAX)))


def _all_well(cards: list[WorkerCard], minute: LastMinute, now: float) -> Sentence:
    ready = sum(card.phase == READY for card in cards)
    text = f"All is well: {many(ready, 'worker')} ready, {minute.per_s(now):.1f} requests per second."
    return Sentence(level=INFO, text=text)


def _services(ledger: Ledger) -> Iterator[Sentence]:
    statuses = [status for status, _heard in ledger.services.values()]
    for status in statuses:
        if status.phase is ServicePhase.FAILED:
            text = f"{status.service} {status.instance} has failed: {status.detail or 'it did not say why'}."
            yield Sentence(level=ERROR, text=text, do="See its log; whoever supervises it should start it again.")
    if not any(status.service == "router" and status.phase is ServicePhase.READY for status in statuses):
        yield Sentence(level=ERROR, text="No router is ready: clients get no answers.", do="Start one, or see its log.")
    if ledger.fleet.state is None:
        text = f"No orchestrator was heard for {STALE_S_MAX:g} s: requests are served, but nobody tells who is lost."
        yield Sentence(level=WARNING, text=text, do="Start one, or see its log.")


def _workers(cards: list[WorkerCard]) -> Iterator[Sentence]:
    living = [card for card in cards if card.phase not in ENDED]
    for card in living:
        if card.heard_s_ago >= SILENT_S_MIN:
            text = f"{card.id} has not been heard for {card.heard_s_ago} s; requests go to others."
            yield Sentence(level=WARNING, text=text, do="If it stays silent, see its log.")
    if lost := [card.id for card in cards if card.phase == WorkerPhase.LOST.value]:
        text = f"Lost within the last minute: {_named(lost)}."
        yield Sentence(level=WARNING, text=text, do="See why in its log; `baton up --join` adds a worker.")
    if full := [card.id for card in living if card.kv_used >= FULL and card.waiting]:
        text = f"The KV memory of {_named(full)} is full, and requests wait for room there."
        yield Sentence(level=WARNING, text=text, do=MORE)
    for phase in (WorkerPhase.STARTING, WorkerPhase.PROBING, WorkerPhase.DRAINING):
        if some := [card for card in living if card.phase == phase.value]:
            told = f" ({some[0].note})" if len(some) == 1 and some[0].note else ""
            yield Sentence(level=INFO, text=f"{_named([card.id for card in some])}: {phase.value}{told}.")


def _roles(cards: list[WorkerCard]) -> Iterator[Sentence]:
    ready = Counter(card.role for card in cards if card.phase == READY)
    engines = [card for card in cards if card.phase not in ENDED and card.role != Role.STORE.value]
    if not engines:
        do = "Start some: `baton up --join --both 1`."
        yield Sentence(level=ERROR, text="There are no workers: nothing can be served.", do=do)
        return
    computing, answering = sum(ready[role] for role in COMPUTE), sum(ready[role] for role in ANSWER)
    if not computing and not answering:
        yield Sentence(
            level=ERROR, text="No worker is ready: nothing can be served yet.", do="See what they do, below."
        )
    elif not computing or not answering:
        missing, there = ("prefill", "decode") if not computing else ("decode", "prefill")
        text = f"No {missing} worker is ready: {there} workers do both phases, if they must."
        yield Sentence(
            level=WARNING, text=text, do=f"`baton role ID {missing}` changes one, `baton up --join` adds one."
        )


def _requests(minute: LastMinute, now: float) -> Iterator[Sentence]:
    requests, failed = minute.requests(now), minute.failed(now)
    if failed:
        reason = minute.most_frequent_reason(now)
        share = failed / max(1, requests)
        ill = share > FAILED_SHARE_ILL and requests >= REQUESTS_MIN
        level = ERROR if ill else WARNING if share > FAILED_SHARE_MAX else INFO
        text = f"In the last minute {failed} of {many(requests, 'request')} failed, most of them with {reason}."
        yield Sentence(level=level, text=text, do=BROKEN.get(reason, LOOK))
    if refused := minute.refused(now):
        text = (
            f"In the last minute {refused} of {many(requests, 'request')} were refused because all workers were busy."
        )
        yield Sentence(level=WARNING, text=text, do=MORE)
    late = minute.late(now)
    if requests >= REQUESTS_MIN and late > LATE_SHARE_MAX * requests:
        text = f"In the last minute {late} of {many(requests, 'request')} missed their targets."
        yield Sentence(level=WARNING, text=text, do=f"A slow one's parts, below, say where the time goes. {MORE}")


def _named(ids: Iterable[str]) -> str:
    listed = sorted(ids)
    more = len(listed) - NAMED_MAX
    return ", ".join(listed[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
