"""What the router does about failures of a request's legs, as data: recovery actions in order for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from shared.contracts.failures import Reason

WAIT_S_MAX = 3600.0
"""Upper limit of the waits in the operator's file."""
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=WAIT_S_MAX)]


class FailureKind(StrEnum):
    """What went wrong, as far as the recovery depends on it."""

    PREFILL_LOST = "prefill_lost"
    """The prefill leg broke off: its worker died, left or fell silent, or its frames were lost."""
    HANDOFF_REFUSED = "handoff_refused"
    """The decode worker was granted none of the KV that the prefill worker computed."""
    READ_FAILED = "read_failed"
    """The KV was granted but could not be read. The engine has the request already: it computes what is missing."""
    DECODE_PREEMPTED = "decode_preempted"
    """The decode worker's engine preempted the request, and its KV is gone."""
    DECODE_LOST = "decode_lost"
    """The leg that answers broke off."""
    QUEUE_DEADLINE = "queue_deadline"
    """A leg had not begun to answer at its deadline."""
    WORKER_BUSY = "worker_busy"
    """The worker, or its engine, takes no more requests."""
    CACHE_MISSED = "cache_missed"
    """A decode worker that was to answer alone has too little of the prompt in its cache, or a worker refused by its
    own ``WORKER_CACHE_HIT_THRESHOLD``. Such a worker is avoided where another one can serve the request.
    """
    BUS_DOWN = "bus_down"
    """The router's connection to NATS broke."""


class RecoveryAction(StrEnum):
    """What the router can do. Before the first byte a request is placed again; after it, its stream is resumed."""

    ANOTHER_PREFILL = "another_prefill"
    """Place the request again without the worker that failed; a worker that prefills computes the prompt."""
    ANOTHER_DECODE = "another_decode"
    """Place the request again without the worker that failed, wherever that costs least."""
    PREFILL_ON_DECODE = "prefill_on_decode"
    """One worker computes the prompt and answers. After a failed handoff it is the decode worker."""
    BOUNCE_TO_PREFILL = "bounce_to_prefill"
    """Place the request again with a prefill leg, possibly on the same worker; decode-first is not tried again."""
    RESUME = "resume"
    """The stream continues at another worker, after the tokens that its client has."""
    WAIT = "wait"
    """When none of the other actions can be carried out now, try them again for a while."""
    REFUSE = "refuse"
    """Tell the client."""


PLACING = (
    RecoveryAction.ANOTHER_PREFILL,
    RecoveryAction.ANOTHER_DECODE,
    RecoveryAction.PREFILL_ON_DECODE,
    RecoveryAction.BOUNCE_TO_PREFILL,
)
"""Actions for requests whose client has received nothing yet."""
IN_THE_ENGINE = (FailureKind.HANDOFF_REFUSED, FailureKind.READ_FAILED, FailureKind.DECODE_PREEMPTED)
"""Failures that the decode engine recovers from by itself when PREFILL_ON_DECODE is their first action."""
HANDOFF_SHARE_MIN = 0.5
"""The share of the prompt that a decode worker must have or be granted when it may not compute the prompt itself."""

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


class Recovery(msgspec.Struct, frozen=True):
    """What the router does about one failure."""

    actions: tuple[RecoveryAction, ...]
    """Actions in order: the first that can be carried out is."""
    wait_s: float = 0.0
    """How long the actions are tried again when none can be carried out."""


class FailurePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's decisions about failures."""

    actions: dict[FailureKind, tuple[RecoveryAction, ...]] = msgspec.field(default_factory=DEFAULT_ACTIONS.copy)
    wait_s_max: Seconds = 5.0
    """The longest WAIT of a request whose client has received nothing yet."""
    stream_wait_s_max: Seconds = 30.0
    """The longest WAIT of a stream that has begun."""
    bus_wait_s_max: Seconds = 10.0
    """How long requests whose client has received nothing wait for NATS and the workers to come back, from the
    beginning of the outage; then 503. A server that hangs is given up after six seconds, and another one tried: the
    wait is longer.
    """
    attempts_max: Annotated[int, msgspec.Meta(ge=1)] = 3
    """Attempts of one request, the first included, before the client gets the failure."""
    resumes_max: Annotated[int, msgspec.Meta(ge=0, le=64)] = 3
    """How often a stream that broke off may be resumed. A body's ``baton.resumes_max`` may ask for less."""

    def recovery(self, kind: FailureKind, *, begun: bool) -> Recovery:
        """``begun``: the client has received part of the response."""
        listed = self.actions[kind]
        fit = tuple(one for one in listed if (one is RecoveryAction.RESUME if begun else one in PLACING))
        wait_s = self.stream_wait_s_max if begun else self.wait_s_max
        return Recovery(fit, wait_s if RecoveryAction.WAIT in listed else 0.0)

    @property
    def guards_handoffs(self) -> bool:
        """Whether decode workers must refuse a handoff that fails, so that the router can recover from it."""
        return any(self.actions[kind][0] is not RecoveryAction.PREFILL_ON_DECODE for kind in IN_THE_ENGINE)


BROKEN_OFF = frozenset({
    Reason.WORKER_LOST, Reason.ENGINE_DEAD, Reason.SERVER_LOST, Reason.WORKER_DRAINING, Reason.FRAMES_LOST,
    Reason.CANCELLED,
})  # fmt: skip
KIND_OF_REASON = {
    Reason.WORKER_BUSY: FailureKind.WORKER_BUSY,
    Reason.CACHE_MISSED: FailureKind.CACHE_MISSED,
    Reason.BUS_DOWN: FailureKind.BUS_DOWN,
}
WORKER_UNUSABLE = frozenset({
    Reason.WORKER_DRAINING, Reason.WORKER_LOST, Reason.ENGINE_DEAD, Reason.SERVER_LOST, Reason.DEADLINE,
    Reason.CANCELLED,
})  # fmt: skip
"""Reasons for which the worker can no longer serve this request; another one may."""
MAY_FREE_SOON = frozenset({FailureKind.WORKER_BUSY, FailureKind.DECODE_PREEMPTED})
"""Failures after which the worker may have room again in a moment."""


def kind_of(reason: Reason, *, prefill: bool, answering: bool, after_prefill: bool) -> FailureKind | None:
    """The kind of a leg's failure. None: another attempt would not help.

    ``prefill``: it was a prefill leg; ``answering``: it had begun to answer; ``after_prefill``: it was to take its KV
    from a prefill leg.
    """
    if reason is Reason.CACHE_MISSED and after_prefill:
        return FailureKind.DECODE_PREEMPTED if answering else FailureKind.HANDOFF_REFUSED
    if reason in BROKEN_OFF or (reason is Reason.DEADLINE and answering):
        return FailureKind.PREFILL_LOST if prefill else FailureKind.DECODE_LOST
    return FailureKind.QUEUE_DEADLINE if reason is Reason.DEADLINE else KIND_OF_REASON.get(reason)


def read_policy(written: Mapping[str, Any]) -> FailurePolicy:
    """The operator's policy over the defaults. Raises ValueError with a message for the operator."""
    known = FailurePolicy.__struct_fields__
    if unknown := written.keys() - set(known):
        raise ValueError(f"`{min(unknown)}` is not a setting; there are {', '.join(sorted(known))}")
    try:
        policy = msgspec.convert({name: value for name, value in written.items() if name != "actions"}, FailurePolicy)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    lists = written.get("actions", {})
    if not isinstance(lists, Mapping):
        raise ValueError(  # noqa: TRY004  # the operator's file is wrong, not our code
            "`actions` must be a table: a list of recovery actions for each kind of failure"
        )
    actions = DEFAULT_ACTIONS | {_kind(name): _actions(name, listed) for name, listed in lists.items()}
    return msgspec.structs.replace(policy, actions=actions)


def _kind(name: str) -> FailureKind:
    if name not in list(FailureKind):
        raise ValueError(f"`actions.{name}` is not a kind of failure; there are {', '.join(FailureKind)}")
    return FailureKind(name)


def _actions(name: str, listed: Any) -> tuple[RecoveryAction, ...]:
    if not isinstance(listed, list) or not listed:
        raise ValueError(f'`actions.{name}` must be a list such as ["another_decode", "resume", "wait", "refuse"]')
    for one in listed:
        if one not in list(RecoveryAction):
            raise ValueError(f"`actions.{name}` has {one!r}; there are {', '.join(RecoveryAction)}")
    actions = tuple(RecoveryAction(one) for one in listed)
    if name == FailureKind.READ_FAILED and actions[0] is not RecoveryAction.PREFILL_ON_DECODE:
        raise ValueError(f"`actions.{name}` must begin with prefill_on_decode: an engine computes what it cannot read")
    if len(set(actions)) < len(actions):
        raise ValueError(f"`actions.{name}` names an action twice; only the first counts")
    if RecoveryAction.REFUSE in actions[:-1]:
        raise ValueError(f"`actions.{name}` continues after `refuse`; nothing is done after that")
    if RecoveryAction.WAIT in actions and not set(actions) - {RecoveryAction.WAIT, RecoveryAction.REFUSE}:
        raise ValueError(f"`actions.{name}` has `wait` without an action to try meanwhile; add one")
    return actions
