"""One attempt to serve a request as it was placed: a table of (state, event) -> the next state, and what is done.

An attempt has one leg or two. On one worker, the answering leg does everything. In an offered handoff it follows the
prefill leg; in a streamed one both run side by side, and the decode worker reads the KV while it is computed. What
follows a failed attempt is decided in ``retry``. ``docs/attempt.mmd`` is drawn from the table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from services.router.placement.placement import Placement
from services.router.relay.answer_leg import AnswerLeg
from services.router.relay.prefill_leg import PrefillLeg
from services.router.relay.running_leg import LegServices, NotAnswered, RunningLeg
from services.router.request.context import RequestContext
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import LegId
from shared.contracts.inference import LegKind

REPORT_S_MAX: Final = 1.0
"""How long a complete response waits for its prefill leg to end: only that leg's report is missing then."""
STEP_SHARE_MAX: Final = 0.5
"""The share of a request's remaining time for one step that may be retried: the rest is for the retry."""
OTHER_LEG_OVER: Final = Failure(reason=Reason.CANCELLED, message="the leg beside it is over")


class State(StrEnum):
    """Which legs of an attempt run."""

    PREFILL = "prefill"
    """The prefill leg; the answering leg follows it."""
    BOTH = "both"
    """The prefill leg and the answering leg, side by side."""
    ANSWERING = "answering"
    """The answering leg; the prefill leg, if there was one, is over."""
    PREFILL_LEFT = "prefill_left"
    """The prefill leg; the answering leg is over."""
    OVER = "over"
    """No leg."""


class Event(StrEnum):
    """How a leg ended."""

    PREFILLED = "prefilled"
    PREFILL_FAILED = "prefill failed"
    ANSWERED = "answered"
    ANSWER_FAILED = "answer failed"


class Action(StrEnum):
    """What an event causes."""

    START_ANSWER = "start the answering leg"
    AWAIT_ANSWER = "bound the wait for the first frame"
    STOP_ANSWER = "stop the answering leg, unless it has begun to answer"
    """A leg that has begun to answer has all the KV that it needs."""
    AWAIT_REPORT = "bound the wait for the prefill leg's report"
    STOP_PREFILL = "stop the prefill leg"
    END = "end as this leg did"
    END_AS_ANSWER = "end as the answering leg did"


TRANSITIONS: Final[dict[tuple[State, Event], tuple[State, Action]]] = {
    (State.PREFILL, Event.PREFILLED): (State.ANSWERING, Action.START_ANSWER),
    (State.PREFILL, Event.PREFILL_FAILED): (State.OVER, Action.END),
    (State.BOTH, Event.PREFILLED): (State.ANSWERING, Action.AWAIT_ANSWER),
    (State.BOTH, Event.PREFILL_FAILED): (State.ANSWERING, Action.STOP_ANSWER),
    (State.BOTH, Event.ANSWERED): (State.PREFILL_LEFT, Action.AWAIT_REPORT),
    (State.BOTH, Event.ANSWER_FAILED): (State.PREFILL_LEFT, Action.STOP_PREFILL),
    (State.ANSWERING, Event.ANSWERED): (State.OVER, Action.END),
    (State.ANSWERING, Event.ANSWER_FAILED): (State.OVER, Action.END),
    (State.PREFILL_LEFT, Event.PREFILLED): (State.OVER, Action.END_AS_ANSWER),
    (State.PREFILL_LEFT, Event.PREFILL_FAILED): (State.OVER, Action.END_AS_ANSWER),
}
"""Pairs that are not named have no effect: a leg that a bug has ended may still report."""
STARTS: Final = {State.PREFILL: "offered handoff", State.BOTH: "streamed handoff", State.ANSWERING: "one worker"}


def diagram() -> str:
    """The table as a mermaid state diagram."""
    arrows = [("[*]", state, cause) for state, cause in STARTS.items()]
    arrows += [(state, after, f"{event} / {action}") for (state, event), (after, action) in TRANSITIONS.items()]
    lines = [f"    {state} --> {'[*]' if after is State.OVER else after}: {cause}" for state, after, cause in arrows]
    return "\n".join(["stateDiagram-v2", *lines, ""])


class Attempt:
    """One placement of a request, while its legs run. A leg calls the method that is named for its end."""

    def __init__(
        self,
        services: LegServices,
        context: RequestContext,
        placement: Placement,
        over: Callable[[RequestContext, NotAnswered | None], None],
        crashed: Callable[[RequestContext, Exception], None],
    ) -> None:
        """``over`` is called once at the attempt's end, perhaps before ``begin`` returns: with None when the client has
        its response. ``crashed`` is called instead for a bug.
        """
        self.context = context
        self.placement = placement
        self._services = services
        self._over = over
        self._crashed = crashed
        self._state = State.OVER
        self._legs: list[RunningLeg] = []
        self._error: NotAnswered | None = None
        """Why the answering leg failed; or why the prefill leg did, if that stopped the answering leg."""
        self._patience: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Start the first leg, or both."""
        services, context, placement = self._services, self.context, self.placement
        if placement.prefill is None:
            self._state = State.ANSWERING
            self._start_answer(LegKind.AGGREGATED)
            return
        self._state = State.BOTH if placement.streamed else State.PREFILL
        self._allow(services.settings.first_frame_s_max)
        prefill = PrefillLeg(services, self, services.starter.make(context, placement, LegKind.PREFILL))
        self._legs.append(prefill)
        if not placement.streamed:
            prefill.open()
            return
        answer = self._make_answer(LegKind.DECODE, beside=prefill.start.leg_id)
        services.inbox.hold()
        try:
            prefill.open()
            answer.open()
        finally:
            services.inbox.release()

    def prefilled(self) -> None:
        """The context has the prefill leg's report."""
        self._happened(Event.PREFILLED, None)

    def prefill_failed(self, error: NotAnswered) -> None:
        self._happened(Event.PREFILL_FAILED, error)

    def answered(self) -> None:
        """The client has its response."""
        self._happened(Event.ANSWERED, None)

    def answer_failed(self, error: NotAnswered) -> None:
        self._happened(Event.ANSWER_FAILED, error)

    def crashed(self, bug: Exception) -> None:
        """A bug ends the attempt."""
        legs = self._close()
        for leg in legs:
            if not leg.over:
                leg.close(None)
        self._crashed(self.context, bug)

    def _happened(self, event: Event, error: NotAnswered | None) -> None:
        transition = TRANSITIONS.get((self._state, event))
        if transition is None:
            return
        self._state, action = transition
        context = self.context
        if action is Action.END:
            # The error of a leg that was stopped says less than why it was stopped.
            self._end(error if error is None or self._error is None or context.answering else self._error)
        elif action is Action.END_AS_ANSWER:
            self._end(self._error)
        elif action is Action.START_ANSWER:
            self._start_answer(LegKind.DECODE)
        elif action is Action.AWAIT_ANSWER:
            if not context.answering:
                self._allow_answer()
        elif action is Action.STOP_ANSWER:
            if not (context.answering or any(leg.unread for leg in context.legs)):
                self._error = error
                context.stop(OTHER_LEG_OVER)
        elif action is Action.STOP_PREFILL:
            self._error = error
            context.stop(OTHER_LEG_OVER)
        else:
            context.timings.answered_at = self._services.now()
            if context.decision is not None:
                context.decision.answered = True
            self._patience = asyncio.get_running_loop().call_later(REPORT_S_MAX, context.stop, OTHER_LEG_OVER)

    def _start_answer(self, kind: LegKind) -> None:
        self._allow_answer()
        self._make_answer(kind).open()

    def _make_answer(self, kind: LegKind, *, beside: LegId | None = None) -> AnswerLeg:
        """``beside``: the prefill leg that runs at the same time; else its report, if any, is in the context."""
        start = self._services.starter.make(self.context, self.placement, kind, beside=beside)
        leg = AnswerLeg(self._services, self, start)
        self._legs.append(leg)
        return leg

    def _allow_answer(self) -> None:
        """The next step ends with the response's first frame. An engine sends the head of a response that is no stream
        with its body, when all tokens are there.
        """
        settings = self._services.settings
        if self.context.facts.stream:
            self._allow(settings.first_frame_s_max)
        else:
            self.context.allow(self._services.now(), settings.request_s_max)

    def _allow(self, step_s_max: float) -> None:
        """Bound the next step, so that it leaves time for another attempt if one may follow."""
        context, now = self.context, self._services.now()
        left_s = context.ends_at - now
        share = STEP_SHARE_MAX if context.may_retry(self._services.attempts_max) else 1.0
        context.allow(now, min(step_s_max, share * left_s))

    def _end(self, error: NotAnswered | None) -> None:
        self._close()
        self._over(self.context, error)

    def _close(self) -> list[RunningLeg]:
        """Let go of the legs, which refer to this attempt: a cycle would be garbage. Returns them."""
        if self._patience is not None:
            self._patience.cancel()
        legs, self._legs, self._state = self._legs, [], State.OVER
        return legs
