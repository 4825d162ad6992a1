"""Serve a request: place it, run its legs, place it again when a leg fails early, tell the client when all fails."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from services.router.core.placement import Need, Placed, Refused
from services.router.core.request import Mode, read_request
from services.router.core.terms import Headed
from services.router.core.waiting_lines import Ticket
from services.router.exchange import Exchange
from services.router.flight import LEFT, Flight
from services.router.http_answers import HttpError, bad_request, error_event, failed, refused_field
from services.router.legs import EngineRefused, LegRunner
from services.router.parts import Parts
from shared.bus.port import BusDown, MessageTooLarge
from shared.bus.streams import LegFailed
from shared.contracts.failures import HTTP_STATUS, Failure, Reason

GIVEN_UP = frozenset(
    {Reason.WORKER_DRAINING, Reason.WORKER_BUSY, Reason.WORKER_LOST, Reason.ENGINE_DEAD, Reason.DEADLINE}
)
"""The worker cannot serve this request any more; another one may."""
RETRIED = GIVEN_UP | {Reason.FRAMES_LOST, Reason.CACHE_MISSED}
"""Failures after which a request is placed again, if the client has not seen any of its answer."""
SERVICE_UNAVAILABLE = 503
ENGINE_FULL = Failure(reason=Reason.WORKER_BUSY, message="the engine takes no requests")


class Relay:
    """Serves requests side by side; each call of ``serve`` is one."""

    def __init__(self, parts: Parts) -> None:
        self._settings = parts.settings
        self._now: Callable[[], float] = parts.clock.now
        self._fleet = parts.fleet
        self._inbox = parts.inbox
        self._prompts = parts.prompts
        self._ledger = parts.ledger
        self._decisions = parts.decisions
        self._room = parts.room
        self._terms = parts.terms
        self._tracing = parts.tracing
        self._runner = LegRunner(parts)
        self.flights: set[Flight] = set()

    async def serve(self, exchange: Exchange) -> None:
        """One request from its body to the end of its answer."""
        now = self._now()
        facts = read_request(exchange.head.path, exchange.upload.body())
        flight = Flight(exchange, facts, self._inbox, now, now + self._settings.request_s_max)
        exchange.on_left = flight.client_left
        self.flights.add(flight)
        try:
            with self._tracing.request(flight):
                await self._serve(flight)
        finally:
            self.flights.discard(flight)
            flight.close()
            self._decisions.finished(flight, self._ledger.finished(flight, self._now()))

    async def _serve(self, flight: Flight) -> None:
        facts, head = flight.facts, flight.exchange.head
        headed = Headed(mode=head.mode or Mode.AUTO, class_name=head.class_name, tenant=head.tenant)
        if (fault := self._terms.fault(facts, headed, self._fleet.cluster.workers)) is not None:
            self._tell(flight, refused_field(fault))
            return
        begun = self._now()
        prompt = await self._prompts.of(flight.exchange, facts)
        flight.story.spent.tokenize_s = self._now() - begun
        flight.story.prompt = prompt
        need = self._terms.need(facts, headed, prompt.tokens, prompt.hashes)
        with self._room.ticket(flight, need) as ticket:
            await self._serve_in_turn(flight, need, ticket)

    async def _serve_in_turn(self, flight: Flight, need: Need, ticket: Ticket) -> None:
        """Wait for its turn, then try until an attempt succeeds; further attempts do not wait again."""
        lost: LegFailed | None = None
        placement = await self._admit(flight, ticket)
        while True:
            self._decisions.made(flight, need, placement)
            if isinstance(placement, Refused):
                self._refuse(flight, placement, lost)
                return
            begun = self._now()
            lost = await self._attempt(flight, placement)
            if lost is None:
                return
            self._decisions.failed(flight, lost.failure)
            if not self._may_retry(flight, lost.failure):
                self._fail(flight, lost.failure)
                return
            flight.story.spent.failed_s += self._now() - begun
            need = self._without_failed(need, lost)
            placement = self._place(flight, need)

    async def _admit(self, flight: Flight, ticket: Ticket) -> Placed | Refused:
        """The first placement, when its turn has come."""
        spent, begun = flight.story.spent, self._now()
        with self._tracing.placement(flight):
            placement = self._room.offer(ticket)
        spent.place_s = self._now() - begun
        if placement is None:
            begun = self._now()
            placement = await self._room.turn_of(ticket, flight)
            spent.admission_s = self._now() - begun
        return placement

    def _place(self, flight: Flight, need: Need) -> Placed | Refused:
        begun = self._now()
        with self._tracing.placement(flight):
            placement = self._fleet.place(need, begun)
        flight.story.spent.place_s += self._now() - begun
        return placement

    async def _attempt(self, flight: Flight, placed: Placed) -> LegFailed | None:
        """Run the legs; answers why they did not end well, or None when the client has its answer."""
        flight.attempt(placed)
        try:
            await self._runner.run(flight, placed)
        except LegFailed as lost:
            return lost
        except BusDown as error:
            return LegFailed(Failure(reason=Reason.BUS_DOWN, message=str(error)))
        except MessageTooLarge as error:
            return LegFailed(Failure(reason=Reason.TOO_LARGE, message=str(error)))
        except EngineRefused as no:
            if no.status == SERVICE_UNAVAILABLE and flight.story.attempts < self._settings.attempts_max:
                return LegFailed(ENGINE_FULL, no.worker_id)
            self._pass_on(flight, placed, no)
        return None

    def _may_retry(self, flight: Flight, failure: Failure) -> bool:
        return (
            failure.reason in RETRIED
            and not flight.exchange.begun
            and not flight.exchange.left
            and flight.story.attempts < self._settings.attempts_max
            and self._now() < flight.ends_at
        )

    def _without_failed(self, need: Need, lost: LegFailed) -> Need:
        """The same need, less the worker whose leg failed."""
        self._ledger.retried(lost.failure.reason)
        if lost.failure.reason is Reason.CACHE_MISSED:
            mode = Mode.AUTO if need.mode is Mode.DECODE_FIRST else need.mode
            return msgspec.structs.replace(need, mode=mode, may_decode_first=False)
        if lost.worker_id is None or lost.failure.reason not in GIVEN_UP:
            return need
        return msgspec.structs.replace(need, excluded=need.excluded | {lost.worker_id})

    def _pass_on(self, flight: Flight, placed: Placed, refusal: EngineRefused) -> None:
        """The engine's own error, word for word."""
        flight.story.status = refusal.status
        flight.story.reason = "engine_refused"
        headers = self._runner.headers(flight, placed, refusal.content_type)
        flight.exchange.answer(refusal.status, headers, refusal.body)

    def _refuse(self, flight: Flight, refused: Refused, lost: LegFailed | None) -> None:
        """Nobody can serve it. A client whose attempts ran out of time is told so; an unreadable body is its own."""
        if flight.exchange.left:
            self._fail(flight, LEFT)
        elif lost is not None and lost.failure.reason is Reason.DEADLINE:
            self._fail(flight, lost.failure)
        elif flight.facts.body is None:
            self._tell(flight, bad_request("The body is not a JSON object."))
        else:
            self._tell(flight, failed(refused.reason, refused.message, refused.retry_after_s))

    def _fail(self, flight: Flight, failure: Failure) -> None:
        """The last word on a request that did not end well."""
        exchange, story = flight.exchange, flight.story
        reason = Reason.CANCELLED if flight.exchange.left else failure.reason
        if not exchange.begun and not flight.exchange.left:
            self._tell(flight, failed(reason, failure.message, failure.retry_after_s))
            return
        story.status = HTTP_STATUS[reason]
        story.reason = str(reason)
        if not flight.exchange.left and not exchange.ended:
            exchange.end(error_event(reason, failure.message))

    def _tell(self, flight: Flight, error: HttpError) -> None:
        flight.story.status = error.status
        flight.story.reason = error.reason
        flight.exchange.refuse(error, flight.decision_headers())
