"""What comes after an attempt that failed: the failure policy's answers, tried one after the other."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from services.router.admission.placing import BUS_AWAY, Placing
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.relay.failure_policy import NO_ROOM, WITHOUT_IT, FailureKind, Plan, kind_of
from services.router.relay.migration import excluded, needs, resumed, suits
from services.router.relay.parts import Parts
from services.router.relay.request_context import RequestContext
from services.router.state.bus_health import LOOK_S_MAX, LOOK_S_MIN
from shared.bus.leg_inbox import LegFailed
from shared.contracts.failures import Failure, Reason

Next = tuple[PlacementRequest, Placement | Rejection]
"""Where it goes, or why nowhere; and what was asked for."""


class Recovery:
    """Finds the next attempt."""

    def __init__(self, parts: Parts, placing: Placing) -> None:
        self._now: Callable[[], float] = parts.clock.now
        self._attempts_max = parts.settings.attempts_max
        self._bus_wait_s_max = parts.settings.bus_wait_s_max
        self._policy = parts.failures
        self._presence = parts.bus_health
        self._prompts = parts.prompts
        self._fleet = parts.fleet
        self._inbox = parts.inbox
        self._ledger = parts.ledger
        self._placing = placing

    async def after(self, flight: RequestContext, need: PlacementRequest, lost: LegFailed) -> Next | Failure:
        """``lost`` ended the last attempt. Answers the next one, or the failure that the client is to be told."""
        attempts, begun = flight.attempts, flight.exchange.begun
        failure = lost.failure
        kind = kind_of(
            failure.reason,
            prefill=of_prefill(flight, lost),
            answering=attempts.answering,
            after_prefill=flight.story.placed is not None and flight.story.placed.prefill is not None,
        )
        over = flight.exchange.left or self._inbox.closed or self._now() >= flight.ends_at
        if kind is None or over or not attempts.left(self._attempts_max, begun=begun):
            return told(failure, attempts.why_not) if begun and kind is not None else failure
        plan = self._policy.plan(kind if self._presence.here else FailureKind.BUS_DOWN, begun=begun)
        if not plan.answers:
            return failure
        self._note(flight, lost, kind)
        self._ledger.retried(failure.reason, resumed=begun)
        flight.give_up(failure)
        if begun:
            attempts.broke_at = flight.story.last_at
            need = await self._behind_its_tokens(flight, need)
        found = await self._find(flight, need, plan)
        if isinstance(found[1], Rejection) and begun:
            return told(failure, found[1].message)
        return found

    async def _find(self, flight: RequestContext, need: PlacementRequest, plan: Plan) -> Next:
        """Try the plan's answers, until its time is over if need be."""
        wait_s = self._bus_wait_s_max if not (self._presence.here or flight.exchange.begun) else plan.wait_s
        until = min(self._now() + wait_s, flight.ends_at)
        look_s = LOOK_S_MIN
        while True:
            if not self._presence.here and not (plan.wait_s and await self._presence.back(flight, until)):
                return need, BUS_AWAY
            found = self._look(flight, need, plan)
            now = self._now()
            if isinstance(found[1], Placement) or now >= until or flight.exchange.left:
                return found
            await self._presence.pause(flight, min(look_s, until - now))
            look_s = min(2 * look_s, LOOK_S_MAX)
            flight.attempts.busy.clear()  # They may have room by now.

    def _look(self, flight: RequestContext, need: PlacementRequest, plan: Plan) -> Next:
        attempts = flight.attempts
        without = excluded(attempts.failed, self._fleet.cluster.workers, attempts.like) | attempts.busy
        last: Next | None = None
        for answer in plan.answers:
            for asked in needs(need, answer, without):
                placed = self._placing.again(flight, asked)
                if isinstance(placed, Rejection):
                    last = last or (asked, placed)
                elif suits(answer, placed):
                    return asked, placed
        return last or (need, NOBODY_SUITS)

    def _note(self, flight: RequestContext, lost: LegFailed, kind: FailureKind) -> None:
        """Whom not to ask again: for this request, or for a while."""
        attempts, placed, reason = flight.attempts, flight.story.placed, lost.failure.reason
        if attempts.like is None and placed is not None and flight.exchange.begun:
            attempts.like = placed.decode.record.fingerprint
        if lost.worker_id is None or placed is None:
            return
        if kind in NO_ROOM:
            attempts.busy.add(lost.worker_id)
            return
        if reason not in WITHOUT_IT:
            return
        for view in (placed.decode, placed.prefill):
            if view is not None and view.record.worker_id == lost.worker_id:
                attempts.failed[lost.worker_id] = view.record.epoch

    async def _behind_its_tokens(self, flight: RequestContext, need: PlacementRequest) -> PlacementRequest:
        """As the workers will see it: the prompt, and behind it what the client has had."""
        tokens = flight.attempts.had.tokens
        prompt = await self._prompts.of(flight.exchange, flight.facts, tokens)
        return resumed(need, prompt.tokens, prompt.hashes, len(tokens))


NOBODY_SUITS = Rejection(
    reason=Reason.NO_WORKER,
    message="No worker is ready that could take over from the one that failed. Try again shortly.",
    retry_after_s=1.0,
)


def of_prefill(flight: RequestContext, lost: LegFailed) -> bool:
    """Whether it was the prefill leg that failed."""
    placed = flight.story.placed
    return placed is not None and placed.prefill is not None and placed.prefill.record.worker_id == lost.worker_id


def told(failure: Failure, why: str) -> Failure:
    """What the client of a broken stream reads."""
    message = f"{failure.message}; and it could not go on elsewhere: {why}" if why else failure.message
    return msgspec.structs.replace(failure, message=message)
