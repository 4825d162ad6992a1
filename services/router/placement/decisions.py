"""What this router decided and what came of it, and where to ask for what others decided."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from services.router.placement.choice import asked_of, choice_of
from services.router.placement.decision_log import DecisionLog, Outcome, router_of
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.relay.request_context import RequestContext
from shared.bus.port import Bus, BusError, Envelope, Subscription
from shared.contracts.channels import DECISION
from shared.contracts.decisions import AskDecision, Decision, FoundDecision
from shared.contracts.failures import Failure
from shared.contracts.ids import DecisionId, RequestId, RouterId, is_subject_token
from shared.contracts.inference import RequestFinished
from shared.runtime.clock import Clock

log = logging.getLogger("baton.router")

DECISION_S_MAX = 2.0
"""For another router to say what it decided."""
ASKED_MAX = 64
"""Routers that are asked at a time for one decision; no more than answer at once."""
OK = "ok"


class Decisions:
    """Remembers a router's decisions. Nothing of a prompt is in them but its length."""

    def __init__(self, router_id: RouterId, bus: Bus, clock: Clock, *, count_max: int, bytes_max: int) -> None:
        self.log = DecisionLog(router_id, count_max=count_max, bytes_max=bytes_max)
        self.router_id = router_id
        self.others: Callable[[], Iterable[RouterId]] = tuple
        """The other routers that are there just now."""
        self._bus = bus
        self._clock = clock
        self._answering: Subscription | None = None

    async def open(self) -> None:
        """RecoveryAction who asks; live when it returns."""
        self._answering = await self._bus.answer(DECISION, self._on_ask, router_id=self.router_id)

    async def close(self) -> None:
        """RecoveryAction no more."""
        if self._answering is not None:
            await self._answering.close()

    def made(self, flight: RequestContext, need: PlacementRequest, placement: Placement | Rejection) -> None:
        """The flight is placed, or cannot be."""
        story = flight.story
        asked = asked_of(
            need,
            flight.exchange.head.request_id,
            self._clock.wall_ms() / 1000,
            attempt=flight.attempts.count + 1,
            exact=story.prompt is not None and story.prompt.exact,
        )
        flight.decision = self.log.made(asked, choice_of(placement), flight.decision)

    def failed(self, flight: RequestContext, failure: Failure) -> None:
        """The last placement did not lead to an answer."""
        if flight.decision is not None:
            flight.decision.outcome = Outcome(outcome=str(failure.reason))

    def finished(self, flight: RequestContext, told: RequestFinished) -> None:
        """The request is over."""
        if flight.decision is not None:
            flight.decision.outcome = Outcome(
                outcome=told.reason or OK,
                measured=told.ttft_parts,
                ttft_s=told.ttft_s,
                itl_s=told.itl_s,
                cached_tokens=told.cached_tokens,
            )

    async def find(self, decision_id: str) -> Decision | None:
        """Wherever it was made. None: nobody remembers it."""
        found = self.log.find(decision_id)
        router_id = router_of(decision_id)
        if found is not None or router_id in ("", self.router_id):
            return found
        return await self._ask(AskDecision(router_id=router_id, decision_id=DecisionId(decision_id)))

    async def newest(self) -> Decision | None:
        """Of all routers."""
        asks = [AskDecision(router_id=router_id) for router_id in self.others()]
        return newest_of([self.log.newest(), *await self._ask_all(asks)])

    async def of_request(self, request_id: str) -> Decision | None:
        """The last placement of that request, wherever it was made."""
        mine = self.log.of_request(request_id)
        if mine or not is_subject_token(request_id):
            return mine[0] if mine else None
        named = RequestId(request_id)
        asks = [AskDecision(router_id=router_id, request_id=named) for router_id in self.others()]
        return newest_of(await self._ask_all(asks))

    async def _ask_all(self, asks: list[AskDecision]) -> list[Decision | None]:
        return list(await asyncio.gather(*(self._ask(ask) for ask in asks[:ASKED_MAX])))

    async def _ask(self, ask: AskDecision) -> Decision | None:
        try:
            return (await self._bus.ask(DECISION, ask, timeout_s=DECISION_S_MAX)).decision
        except BusError as error:
            log.debug("%s does not say what it decided: %s", ask.router_id, error)
            return None

    async def _on_ask(self, ask: AskDecision, _envelope: Envelope) -> FoundDecision:
        if ask.decision_id:
            return FoundDecision(decision=self.log.find(ask.decision_id))
        if ask.request_id:
            attempts = self.log.of_request(ask.request_id)
            return FoundDecision(decision=attempts[0] if attempts else None)
        return FoundDecision(decision=self.log.newest())


def newest_of(found: Iterable[Decision | None]) -> Decision | None:
    """The last one made; None when there is none."""
    return max((one for one in found if one is not None), key=lambda one: one.at_unix_s, default=None)
