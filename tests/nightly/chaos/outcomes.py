"""Whether the outcome of each request is permitted: pure rules over the clients' records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from shared.contracts.failures import HTTP_STATUS, Reason
from tests.nightly.chaos.faults import Fault, Kind, Part
from tests.nightly.chaos.keys import REFUSED, RELOAD_S_MAX, REVOCABLE
from tests.nightly.chaos.oracle import OTHER_MODEL
from tests.nightly.chaos.trace import Ask, Batch

OK = 200
CODES = {str(reason): HTTP_STATUS[reason] for reason in Reason}
"""Every documented failure that a client may be told of a good request, and the status that belongs to it."""
BUGS = {str(Reason.INTERNAL), str(Reason.BAD_MESSAGE)}
"""Documented, and never right."""


BUS_AWAY_S_MIN = 1.0
"""An outage of NATS that is shorter costs nobody anything: new requests wait for it, streams go on when it is back."""
NOT_READY = {str(Reason.BUS_DOWN), str(Reason.NO_WORKER)}
TOO_MUCH = {str(reason) for reason in (Reason.OVERLOADED, Reason.DEADLINE, Reason.FRAMES_LOST, Reason.WORKER_LOST)}
"""What a machine without time for it makes of good requests: too many, too late, and, since the proxies run in this
process, legs that their workers do not know for seconds and workers that are silent as long.
"""
LAG_SHARE_MAX = 0.25
"""Of a request's time. A machine of its own keeps this process waiting for a few hundredths."""
UNREADY_S_MAX = 40.0
"""Time for a router to start, or to find its fleet again, on a machine that runs much else."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One request as its client saw it. Seconds are those of the run."""

    number: int
    router: str
    sent_s: float
    ended_s: float = 0.0
    status: int = 0
    """0: no answer came."""
    code: str = ""
    """Of the error that it was told."""
    message: str = ""
    """The error's message."""
    unready_s: float = 0.0
    """How long its router had not been ready when it was sent; 0: it was ready."""
    lag_s: float = 0.0
    """How long this process was kept from running meanwhile, as all others on the machine."""
    text: str = ""
    finishes: list[str] = field(default_factory=list)
    dones: int = 0
    events_after_end: int = 0
    is_cut: bool = False
    """The connection ended before the answer did."""
    left: bool = False
    """Its client has left, as it was to."""
    events: int = 0
    """Numbered ones."""
    last_event: str = ""
    """The name of the last event that has one."""
    disorder: str = ""
    """Why the events make no answer, in words."""
    reused: bool = False
    """Its connection had served a request before."""
    first_s: float = -1.0
    """The first piece of the answer."""
    gap_s: float = 0.0
    """The longest wait between two pieces."""
    decode_worker: str = ""

    @property
    def is_answered(self) -> bool:
        return self.status == OK and not self.code and not self.is_cut and not self.left

    def describe(self) -> str:
        """For a person."""
        marks = [("cut", self.is_cut), ("left", self.left), ("on a kept connection", self.reused)]
        end = " ".join([f"status {self.status}", *filter(None, [self.code]), *(mark for mark, is_so in marks if is_so)])
        return (
            f"#{self.number} via {self.router} {self.sent_s:.2f}..{self.ended_s:.2f} s: {end}, {len(self.text)} chars"
            f"{': ' + self.message if self.message else ''}"
        )


LOST, NEVER_ENDED = "lost", "never ended"
"""Ends of a batch that are none."""
COMPLETED = "completed"


@dataclass(frozen=True, slots=True, kw_only=True)
class LineOutcome:
    """One result of a batch."""

    number: int
    code: str = ""
    text: str = ""


@dataclass(slots=True, kw_only=True)
class BatchOutcome:
    """One batch as its client saw it, from the upload to the results."""

    number: int
    sent_s: float
    ended_s: float = 0.0
    status: str = ""
    lines: list[LineOutcome] = field(default_factory=list)

    def describe(self) -> str:
        """For a person."""
        return f"batch {self.number} {self.sent_s:.2f}..{self.ended_s:.2f} s: {self.status}, {len(self.lines)} lines"


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """A fault as it was really done."""

    fault: Fault
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is promised."""

    deadline_s: float
    """A request's whole budget, and what its client allows for the way."""
    settle_s: float = 8.0
    """Until a fault of the bus is behind everybody: silence that is noticed, connections that come back."""
    other_workers: Collection[str] = ()
    """Those of the second model."""


def violations(
    asks: Sequence[Ask], outcomes: Sequence[Outcome], faults: Sequence[Happened], limits: Limits
) -> list[str]:
    """Everything that may not be, in words. No violation: every request ended once, in time, and rightly."""
    found = [
        f"#{number} ended {count} times" for number, count in Counter(o.number for o in outcomes).items() if count > 1
    ]
    missing = {ask.number for ask in asks} - {outcome.number for outcome in outcomes}
    found += [f"#{number} never ended" for number in sorted(missing)]
    by_number = {ask.number: ask for ask in asks}
    for outcome in outcomes:
        ask = by_number.get(outcome.number)
        if ask is None:
            found.append(f"#{outcome.number} was never asked")
            continue
        found += [f"{wrong}: {outcome.describe()}" for wrong in _wrongs(ask, outcome, faults, limits)]
    return found


def _wrongs(ask: Ask, outcome: Outcome, faults: Sequence[Happened], limits: Limits) -> Iterator[str]:
    yield from _wrong_content(ask, outcome)
    if outcome.decode_worker and (ask.model == OTHER_MODEL) != (outcome.decode_worker in limits.other_workers):
        yield f"served by {outcome.decode_worker}, a worker of another model than {ask.model}"
    yield from _wrong_access(ask, outcome, faults)
    if outcome.code in REFUSED:
        return
    yield from _wrong_error(outcome)
    near = [happened for happened in faults if _touches(happened, outcome, limits)]
    if outcome.is_cut and not any(_cuts(happened, outcome) for happened in near):
        yield "the connection ended, and its router was well"
    elif (
        outcome.code
        and not (_is_sent_to_nobody(outcome) or _is_starved(outcome))
        and not any(_may_fail(happened, outcome.router) for happened in near)
    ):
        yield "failed without an excuse"
    late_s = outcome.ended_s - outcome.sent_s - limits.deadline_s
    frozen_s = sum(happened.ended_s - happened.began_s for happened in near if _freezes(happened, outcome))
    if late_s > frozen_s:
        yield f"{late_s:.1f} s late"


def _wrong_content(ask: Ask, outcome: Outcome) -> Iterator[str]:
    """Whatever a client was given is the right answer or its beginning, and has one end."""
    if not ask.answer.startswith(outcome.text):
        yield "wrong tokens"
    if outcome.disorder:
        yield f"events out of order, {outcome.disorder}"
    if not outcome.is_answered:
        return
    if outcome.text != ask.answer:
        yield "tokens are missing"
    if outcome.finishes != ["length"]:
        yield f"finish reasons {outcome.finishes}"
    if ask.stream and (outcome.dones != 1 or outcome.events_after_end):
        yield f"{outcome.dones} ends and {outcome.events_after_end} events after the end"


def _wrong_access(ask: Ask, outcome: Outcome, faults: Sequence[Happened]) -> Iterator[str]:
    """A key is refused only while it is revoked, and then by every router that has had the time to read so."""
    revoked = [one for one in faults if one.fault.kind is Kind.REVOKE and ask.key == REVOCABLE]
    if outcome.code in REFUSED:
        if outcome.status not in (REFUSED[outcome.code], OK):  # 200: it was a stream.
            yield f"status {outcome.status} of {outcome.code!r}"
        if not any(one.began_s <= outcome.ended_s and outcome.sent_s <= one.ended_s + RELOAD_S_MAX for one in revoked):
            yield "refused with a valid key"
    elif outcome.status == OK:
        frozen = [one for one in faults if one.fault.kind is Kind.FREEZE and one.fault.target == outcome.router]
        for one in revoked:
            begins_s = max([one.began_s, *(froze.ended_s for froze in frozen if froze.began_s <= outcome.sent_s)])
            if begins_s + RELOAD_S_MAX <= outcome.sent_s <= one.ended_s:
                yield "served with a revoked key"


def _wrong_error(outcome: Outcome) -> Iterator[str]:
    if outcome.is_answered or outcome.is_cut or (outcome.left and not outcome.code):
        return
    if outcome.code not in CODES:
        yield f"an error that is not documented, {outcome.code!r}"
    elif outcome.code in BUGS:
        yield "a bug"
    elif outcome.status != OK and outcome.status != CODES[outcome.code]:
        yield f"status {outcome.status} of {outcome.code!r}"
    if outcome.finishes or outcome.dones:
        yield "an answer that ended well and failed"


def batch_violations(
    batches: Sequence[Batch], outcomes: Sequence[BatchOutcome], faults: Sequence[Happened], limits: Limits
) -> list[str]:
    """Everything that may not be of a batch: it ends, and each of its lines is answered once, and rightly."""
    found = [
        f"batch {missing} was never sent" for missing in {b.number for b in batches} - {o.number for o in outcomes}
    ]
    by_number = {batch.number: batch for batch in batches}
    for outcome in outcomes:
        wrongs = _wrong_batch(by_number[outcome.number], outcome, faults, limits)
        found += [f"{wrong}: {outcome.describe()}" for wrong in wrongs]
    return found


def _wrong_batch(batch: Batch, outcome: BatchOutcome, faults: Sequence[Happened], limits: Limits) -> Iterator[str]:
    """Only what NATS has forgotten is lost. A line may fail as any other request, by way of any router."""
    near = [happened for happened in faults if _touches(happened, outcome, limits)]
    asks = {ask.number: ask for ask in batch.lines}
    for line in outcome.lines:
        if not line.code and line.text != asks[line.number].answer:
            yield f"line {line.number} has wrong tokens"
        elif line.code in BUGS or (line.code and line.code not in CODES):
            yield f"line {line.number} failed with {line.code!r}"
        elif line.code and not any(_may_fail(happened, happened.fault.target) for happened in near):
            yield f"line {line.number} failed without an excuse"
    if any(happened.fault.kind is Kind.FORGET for happened in near):
        return
    if outcome.status != COMPLETED:
        yield "a batch did not complete"
        return
    times = Counter(line.number for line in outcome.lines)
    if wrong := {number: times[number] for number in asks if times[number] != 1}:
        yield f"lines with another number of results than one, {wrong}"


def _touches(happened: Happened, outcome: Outcome | BatchOutcome, limits: Limits) -> bool:
    """Whether the request was under way while the fault was, or while others still found out."""
    return happened.began_s <= outcome.ended_s and outcome.sent_s <= happened.ended_s + limits.settle_s


def _cuts(happened: Happened, outcome: Outcome) -> bool:
    fault = happened.fault
    return fault.kind is Kind.KILL and fault.target == outcome.router


def _is_starved(outcome: Outcome) -> bool:
    """Whether the machine could not compute what it was asked for, and the request was told so."""
    return outcome.code in TOO_MUCH and outcome.lag_s > LAG_SHARE_MAX * (outcome.ended_s - outcome.sent_s)


def _is_sent_to_nobody(outcome: Outcome) -> bool:
    """Whether its router had said for a while that it is not ready, and says so again. A load balancer sends nothing
    there while another one is ready. On a slow machine a router starts, or is back after an outage, that late.
    """
    return outcome.code in NOT_READY and BUS_AWAY_S_MIN < outcome.unready_s <= UNREADY_S_MAX


def _freezes(happened: Happened, outcome: Outcome) -> bool:
    fault = happened.fault
    return fault.kind is Kind.FREEZE and (fault.target == outcome.router or fault.part is Part.NATS)


def _may_fail(happened: Happened, router: str) -> bool:
    """Whether a request by way of this router may end with a documented error: only if the bus was away for longer than a request has to wait for
    it, or if messages were lost, again and again perhaps. That workers die is no excuse, nor is what operators do, or
    a slow link.
    """
    fault = happened.fault
    if fault.part is Part.NATS or (fault.part is Part.ROUTER and fault.kind in (Kind.CUT, Kind.VANISH)):
        is_its = fault.part is Part.NATS or fault.target == router
        return is_its and happened.ended_s - happened.began_s > BUS_AWAY_S_MIN
    return fault.kind is Kind.LOSE and (fault.part is Part.WORKER or fault.target == router)


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    """All requests that were not answered, though their clients waited."""
    return [outcome.describe() for outcome in outcomes if not outcome.is_answered and not outcome.left]
