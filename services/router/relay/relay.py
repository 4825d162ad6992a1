"""Serve a request: place it, run its legs, place it again when a leg fails early, tell the client when all fails."""

from __future__ import annotations

from collections.abc import Callable

from services.router.admission.placing import Placing
from services.router.admission.queues import QueueEntry
from services.router.auth.authenticator import limited
from services.router.auth.rate_limit import tokens_used
from services.router.auth.tenant_salt import salted
from services.router.http.errors import HttpError, bad_request, error_event, failed, refused_field
from services.router.http.request import HttpRequest
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.placement.policy import RequestHeaders
from services.router.placement.request_fields import Mode, default_or_requested, read_request
from services.router.relay.attempt import Attempts
from services.router.relay.legs import EngineRefused, LegRunner
from services.router.relay.migration import resumes_allowed, why_not_resumed
from services.router.relay.parts import Parts
from services.router.relay.request_context import LEFT, RequestContext
from services.router.relay.retry import Recovery
from shared.bus.leg_inbox import LegFailed
from shared.bus.port import BusDown, MessageTooLarge
from shared.contracts.failures import HTTP_STATUS, Failure, Reason
from shared.contracts.inference import RequestFinished
from shared.telemetry.span_names import SpanName

SERVICE_UNAVAILABLE = 503
ENGINE_FULL = Failure(reason=Reason.WORKER_BUSY, message="the engine takes no requests")


class Relay:
    """Serves requests side by side; each call of ``serve`` is one."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._now: Callable[[], float] = parts.clock.now
        self._prompts = parts.prompts
        self._ledger = parts.ledger
        self._decisions = parts.decisions
        self._room = parts.room
        self._tracing = parts.tracing
        self._runner = LegRunner(parts)
        self._placing = Placing(parts)
        self._recovery = Recovery(parts, self._placing)
        self.flights: set[RequestContext] = set()

    async def serve(self, exchange: HttpRequest) -> None:
        """One request from its body to the end of its answer."""
        now = self._now()
        client = exchange.head.client
        facts = salted(read_request(exchange.head.path, exchange.upload.body()), client.key, client.secret)
        resumes_max = resumes_allowed(self._settings.resumes_max, facts.wishes.resumes_max)
        attempts = Attempts(resumes_max, why_not_resumed(facts))
        flight = RequestContext(exchange, facts, self._parts.inbox, attempts, now, now + self._settings.request_s_max)
        exchange.on_left = flight.client_left
        self.flights.add(flight)
        try:
            self._tracing.begin(flight)
            await self._serve(flight)
        finally:
            self.flights.discard(flight)
            flight.close()
            told = self._ledger.finished(flight, self._now())
            self._decisions.finished(flight, told)
            if flight.charged:
                client.rate_limit.settle(self._now(), flight.charged, used(flight, told))

    async def _serve(self, flight: RequestContext) -> None:
        facts, head = flight.facts, flight.exchange.head
        key = flight.exchange.head.client.key
        tenant = key.tenant or head.tenant
        mode = default_or_requested(facts, head.mode or Mode.AUTO, self._parts.usual.mode)
        request_headers = RequestHeaders(mode=mode, class_name=head.class_name, tenant=tenant, key=key)
        if (fault := self._parts.terms.fault(facts, request_headers, self._parts.fleet.cluster.workers)) is not None:
            self._tell(flight, refused_field(fault))
            return
        begun = self._now()
        prompt = await self._prompts.of(flight.exchange, facts)
        ended = self._now()
        flight.story.spent.tokenize_s = ended - begun
        flight.mark(SpanName.TOKENIZE, begun, ended)
        flight.story.prompt = prompt
        if (over := self._charge(flight, prompt.tokens)) is not None:
            self._tell(flight, over)
            return
        need = self._parts.terms.need(facts, request_headers, prompt.tokens, prompt.hashes)
        with self._room.ticket(flight, need) as ticket:
            await self._serve_in_turn(flight, need, ticket)

    def _charge(self, flight: RequestContext, prompt_tokens: int) -> HttpError | None:
        """Take the prompt's tokens of what its key may use; why not."""
        client, now = flight.exchange.head.client, self._now()
        over = client.rate_limit.tokens(now, prompt_tokens)
        if over is not None:
            return limited(over, client, now)
        flight.charged = prompt_tokens
        return None

    async def _serve_in_turn(self, flight: RequestContext, need: PlacementRequest, ticket: QueueEntry) -> None:
        """Wait for its turn, then try until an attempt succeeds; further attempts do not stand in line again."""
        lost: LegFailed | None = None
        placement = await self._placing.first(flight, ticket)
        while True:
            self._decisions.made(flight, need, placement)
            if isinstance(placement, Rejection):
                self._refuse(flight, placement, lost)
                return
            begun, placing_s = self._now(), flight.story.spent.place_s
            lost = await self._attempt(flight, placement)
            if lost is None:
                return
            self._decisions.failed(flight, lost.failure)
            found = await self._recovery.after(flight, need, lost)
            if isinstance(found, Failure):
                self._fail(flight, found)
                return
            placing_s = flight.story.spent.place_s - placing_s
            flight.story.spent.failed_s += max(0.0, self._now() - begun - placing_s)
            need, placement = found

    async def _attempt(self, flight: RequestContext, placed: Placement) -> LegFailed | None:
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
            more = flight.attempts.left(self._settings.attempts_max, begun=flight.exchange.begun)
            if no.status == SERVICE_UNAVAILABLE and more:
                return LegFailed(ENGINE_FULL, no.worker_id)
            if flight.exchange.begun:
                return LegFailed(Failure(reason=Reason.CANNOT_RESUME, message=no.as_text()), no.worker_id)
            self._pass_on(flight, placed, no)
        return None

    def _pass_on(self, flight: RequestContext, placed: Placement, refusal: EngineRefused) -> None:
        """The engine's own error, word for word."""
        flight.story.status = refusal.status
        flight.story.reason = "engine_refused"
        headers = self._runner.headers(flight, placed, refusal.content_type)
        flight.exchange.answer(refusal.status, headers, refusal.body)

    def _refuse(self, flight: RequestContext, refused: Rejection, lost: LegFailed | None) -> None:
        """Nobody can serve it. A client whose attempts ran out of time is told so; an unreadable body is its own."""
        if flight.exchange.left:
            self._fail(flight, LEFT)
        elif lost is not None and lost.failure.reason is Reason.DEADLINE:
            self._fail(flight, lost.failure)
        elif flight.facts.body is None:
            self._tell(flight, bad_request("The body is not a JSON object."))
        else:
            self._tell(flight, failed(refused.reason, refused.message, refused.retry_after_s))

    def _fail(self, flight: RequestContext, failure: Failure) -> None:
        """The last word on a request that did not end well."""
        exchange, story = flight.exchange, flight.story
        reason = (Reason.CLIENT_SLOW if exchange.slow else Reason.CANCELLED) if exchange.left else failure.reason
        if not exchange.begun and not flight.exchange.left:
            self._tell(flight, failed(reason, failure.message, failure.retry_after_s))
            return
        story.status = HTTP_STATUS[reason]
        story.reason = str(reason)
        if not flight.exchange.left and not exchange.ended:
            exchange.end(error_event(reason, failure.message))

    def _tell(self, flight: RequestContext, error: HttpError) -> None:
        flight.story.status = error.status
        flight.story.reason = error.reason
        flight.exchange.refuse(error, flight.decision_headers())


def used(flight: RequestContext, told: RequestFinished) -> int:
    """Tokens that the request has cost whoever asked for it."""
    return tokens_used(
        charged=flight.charged,
        prompt=told.prompt_tokens,
        completion=told.completion_tokens,
        relayed=len(flight.attempts.had.tokens),
        was_placed=flight.story.placed is not None,
    )
