"""What a router does about each failure of a request's legs, as data: for each kind an ordered list of answers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from shared.contracts.failures import Reason

WAIT_S_MAX = 3600.0
"""More than that no operator means."""


class FailureKind(StrEnum):
    """What went wrong, as far as it matters for what is done about it."""

    PREFILL_LOST = "prefill_lost"
    """The prefill leg broke off: its worker died, left, fell silent, or its frames were lost."""
    HANDOFF_REFUSED = "handoff_refused"
    """The decode worker was granted none of the KV that the prefill worker computed."""
    READ_FAILED = "read_failed"
    """It was granted, but could not be read. The engine has its turn already: it computes what did not come."""
    DECODE_PREEMPTED = "decode_preempted"
    """The decode worker took the request out of its batch, and its KV is gone."""
    DECODE_LOST = "decode_lost"
    """The leg that answers broke off."""
    QUEUE_DEADLINE = "queue_deadline"
    """A leg had not begun to answer when its time was over."""
    WORKER_BUSY = "worker_busy"
    """The worker, or its engine, took no more."""
    CACHE_MISSED = "cache_missed"
    """A decode worker that was asked to answer alone has too little of the prompt."""
    BUS_DOWN = "bus_down"
    """The router's connection to NATS broke."""


class RecoveryAction(StrEnum):
    """What can be done about it. Before the first byte a request is placed again; after it, its stream is resumed."""

    ANOTHER_PREFILL = "another_prefill"
    """Placement again without the worker that failed; the prompt is computed by a worker that prefills."""
    ANOTHER_DECODE = "another_decode"
    """Placement again without the worker that failed, wherever that costs least."""
    PREFILL_ON_DECODE = "prefill_on_decode"
    """One worker computes the prompt and answers; of a handoff that failed: the decode worker computes the rest."""
    BOUNCE_TO_PREFILL = "bounce_to_prefill"
    """Back to a prefill worker, the same one if it is the best; its decode worker is asked for no answer of its own."""
    RESUME = "resume"
    """The stream goes on elsewhere, behind the tokens that its client has had."""
    WAIT = "wait"
    """When none of the others can be done now, they are tried again for a while."""
    REFUSE = "refuse"
    """The client is told."""


PLACING = (
    RecoveryAction.ANOTHER_PREFILL,
    RecoveryAction.ANOTHER_DECODE,
    RecoveryAction.PREFILL_ON_DECODE,
    RecoveryAction.BOUNCE_TO_PREFILL,
)
"""For requests of which the client has seen nothing."""
IN_THE_ENGINE = (FailureKind.HANDOFF_REFUSED, FailureKind.READ_FAILED, FailureKind.DECODE_PREEMPTED)
"""What an engine answers by itself with PREFILL_ON_DECODE, as long as that is the first answer."""
HANDOFF_SHARE_MIN = 0.5
"""Of the prompt, what a decode worker must have or be given if it shall not compute it."""

_A, _K = RecoveryAction, FailureKind
DEFAULT_ACTIONS: dict[FailureKind, tuple[RecoveryAction, ...]] = {
    _K.PREFILL_LOST: (_A.ANOTHER_PREFILL, _A.PREFILL_ON_DECODE, _A.RESUME, _A.WAIT, _A.REFUSE),
    _K.HANDOFF_REFUSED: (_A.PREFILL_ON_DECODE, _A.BOUNCE_TO_PREFILL, _A.RESUME, _A.WAIT, _A.REFUSE),
    _K.READ_FAILED: (_A.PREFILL_ON_DECODE, _A.RESUME, _A.REFUSE),
    _K.DECODE_PREEMPTED: (_A.PREFILL_ON_DECODE, _A.RESUME, _A.WAIT, _A.REFUSE),
    _K.DECODE_LOST: (_A.ANOTHER_DECODE, _A.PREFILL_ON_DECODE, _A.RESUME, _A.WAIT, _A.REFUSE),
    _K.QUEUE_DEADLINE: (_A.ANOTHER_DECODE, _A.RESUME, _A.REFUSE),
    _K.WORKER_BUSY: (_A.ANOTHER_DECODE, _A.PREFILL_ON_DECODE, _A.RESUME, _A.WAIT, _A.REFUSE),
    _K.CACHE_MISSED: (_A.BOUNCE_TO_PREFILL, _A.PREFILL_ON_DECODE, _A.RESUME, _A.WAIT, _A.REFUSE),
    _K.BUS_DOWN: (_A.ANOTHER_DECODE, _A.PREFILL_ON_DECODE, _A.RESUME, _A.WAIT, _A.REFUSE),
}


class Plan(msgspec.Struct, frozen=True):
    """What is done about one failure, in this order."""

    answers: tuple[RecoveryAction, ...]
    wait_s: float = 0.0
    """So long the answers are tried again when none of them can be done."""


class FailurePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator decided about failures."""

    answers: dict[FailureKind, tuple[RecoveryAction, ...]] = msgspec.field(default_factory=DEFAULT_ACTIONS.copy)
    wait_s_max: float = 5.0
    """WAIT, for a request whose client has seen nothing yet."""
    stream_wait_s_max: float = 30.0
    """WAIT, for a stream that has begun."""

    def plan(self, kind: FailureKind, *, begun: bool) -> Plan:
        """For a stream that has ``begun`` (its client has seen some of it), or for a request of which nobody has."""
        answers = self.answers[kind]
        fit = tuple(one for one in answers if (one is RecoveryAction.RESUME if begun else one in PLACING))
        wait_s = self.stream_wait_s_max if begun else self.wait_s_max
        return Plan(fit, wait_s if RecoveryAction.WAIT in answers else 0.0)

    @property
    def guards_handoffs(self) -> bool:
        """Whether a decode worker shall refuse what it would have to compute, so that the router can answer it."""
        return any(self.answers[kind][0] is not RecoveryAction.PREFILL_ON_DECODE for kind in IN_THE_ENGINE)


BROKEN_OFF = frozenset(
    {Reason.WORKER_LOST, Reason.ENGINE_DEAD, Reason.WORKER_DRAINING, Reason.FRAMES_LOST, Reason.CANCELLED}
)
OF_REASON = {
    Reason.WORKER_BUSY: FailureKind.WORKER_BUSY,
    Reason.CACHE_MISSED: FailureKind.CACHE_MISSED,
    Reason.BUS_DOWN: FailureKind.BUS_DOWN,
}
WITHOUT_IT = frozenset(
    {
        Reason.WORKER_DRAINING,
        Reason.WORKER_LOST,
        Reason.ENGINE_DEAD,
        Reason.DEADLINE,
        Reason.CANCELLED,
    }
)
"""The worker cannot serve this request any more; another one may."""
NO_ROOM = frozenset({FailureKind.WORKER_BUSY, FailureKind.DECODE_PREEMPTED})
"""The worker may have room again in a moment."""


def kind_of(reason: Reason, *, prefill: bool, answering: bool, after_prefill: bool) -> FailureKind | None:
    """What kind of failure it is that a leg ended so; ``prefill``: it was a prefill leg; ``answering``: it had begun to
    answer; ``after_prefill``: it was to take its KV from a prefill leg. None: another worker would do no better, or
    nobody wants an answer.
    """
    if reason is Reason.CACHE_MISSED and after_prefill:
        return FailureKind.DECODE_PREEMPTED if answering else FailureKind.HANDOFF_REFUSED
    if reason in BROKEN_OFF or (reason is Reason.DEADLINE and answering):
        return FailureKind.PREFILL_LOST if prefill else FailureKind.DECODE_LOST
    return FailureKind.QUEUE_DEADLINE if reason is Reason.DEADLINE else OF_REASON.get(reason)


def read_policy(told: Mapping[str, Any]) -> FailurePolicy:
    """The operator's policy; what it does not tell of is as by default. Raises ValueError in words for the operator."""
    known = {"answers", "wait_s_max", "stream_wait_s_max"}
    if strangers := told.keys() - known:
        raise ValueError(f"`{min(strangers)}` means nothing here; there are {', '.join(sorted(known))}")
    policy = FailurePolicy()
    waits = {name: _seconds(name, told.get(name, getattr(policy, name))) for name in sorted(known - {"answers"})}
    lists = told.get("answers", {})
    if not isinstance(lists, Mapping):
        raise ValueError(  # noqa: TRY004  # the operator's file is wrong, not our code
            "`answers` must be a table: a list of answers for each kind of failure"
        )
    answers = DEFAULT_ACTIONS | {_kind(name): _answers(name, given) for name, given in lists.items()}
    return FailurePolicy(answers=answers, **waits)


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= WAIT_S_MAX:
        raise ValueError(f"`{name}` is {value!r}; it must be a number of seconds from 0 to {WAIT_S_MAX:g}")
    return float(value)


def _kind(name: str) -> FailureKind:
    if name not in list(FailureKind):
        raise ValueError(f"`answers.{name}` is no kind of failure; there are {', '.join(FailureKind)}")
    return FailureKind(name)


def _answers(name: str, given: Any) -> tuple[RecoveryAction, ...]:
    if not isinstance(given, list) or not given:
        raise ValueError(f'`answers.{name}` must be a list such as ["another_decode", "resume", "wait", "refuse"]')
    for one in given:
        if one not in list(RecoveryAction):
            raise ValueError(f"`answers.{name}` has {one!r}; there are {', '.join(RecoveryAction)}")
    answers = tuple(RecoveryAction(one) for one in given)
    if name == FailureKind.READ_FAILED and answers[0] is not RecoveryAction.PREFILL_ON_DECODE:
        raise ValueError(f"`answers.{name}` must begin with prefill_on_decode: an engine computes what it cannot read")
    if len(set(answers)) < len(answers):
        raise ValueError(f"`answers.{name}` names an answer twice; the first time is all that counts")
    if RecoveryAction.REFUSE in answers[:-1]:
        raise ValueError(f"`answers.{name}` goes on after `refuse`; nothing comes after that")
    if RecoveryAction.WAIT in answers and not set(answers) - {RecoveryAction.WAIT, RecoveryAction.REFUSE}:
        raise ValueError(f"`answers.{name}` says what to wait for nowhere; name what shall be tried meanwhile")
    return answers
