"""Serves a request: places it, runs its legs, retries it when they fail, and tells the client when nothing helps."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec

from services.router.admission.admission_queue import AdmissionQueue
from services.router.admission.placing import Placing
from services.router.admission.queues import QueueEntry
from services.router.auth.api_keys import salted
from services.router.http.errors import bad_request, error_event, failed, path_not_served, refused_field
from services.router.http.request import HttpRequest
from services.router.placement.decision_service import DecisionService
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.placement.policy import RequestHeaders, RequestPolicy
from services.router.placement.request_fields import Mode, default_or_requested
from services.router.placement.revisions import with_primary_name
from services.router.relay.charging import charge, settle, too_many_sequences, used_by
from services.router.relay.legs import EngineRefused, LegRunner
from services.router.relay.migration import resumes_allowed, why_not_resumable
from services.router.relay.request_context import CLIENT_LEFT, RequestContext, ResponseHeaders
from services.router.relay.retry import Retry, Suspects
from services.router.settings import Settings
from services.router.state.cluster_view import ClusterView
from services.router.state.feeds import DefaultModeFeed
from services.router.telemetry.request_log import RequestLog
from services.router.telemetry.tracing import Tracing
from services.router.telemetry.ttft import Timings
from services.router.tokenize.prompts import Prompts
from services.router.usage import Budgets, UsageLog
from shared.bus.leg_inbox import LegFailed, LegInbox
from shared.bus.port import BusDown, MessageTooLarge
from shared.contracts.engine_paths import PLACED, RESPONSES
from shared.contracts.failures import HTTP_STATUS, Failure, Reason
from shared.http.errors import HttpError
from shared.telemetry.span_names import SpanName

SERVICE_UNAVAILABLE = 503
ID_BYTES = 16
ENGINE_FULL = Failure(reason=Reason.WORKER_BUSY, message="the engine takes no requests")


class Relay:
    """Serves requests side by side; each call of ``serve`` is one."""

    def __init__(  # noqa: PLR0913  # wiring
        self,
        *,
        settings: Settings,
        now: Callable[[], float],
        inbox: LegInbox,
        cluster: ClusterView,
        policy: RequestPolicy,
        default_mode: DefaultModeFeed,
        prompts: Prompts,
        queue: AdmissionQueue,
        placing: Placing,
        runner: LegRunner,
        retry: Retry,
        suspects: Suspects,
        decisions: DecisionService,
        request_log: RequestLog,
        usage: UsageLog,
        budgets: Budgets,
        tracing: Tracing,
        response_headers: ResponseHeaders,
    ) -> None:
        self._settings = settings
        self._now = now
        self._inbox = inbox
        self._cluster = cluster
        self._policy = policy
        self._default_mode = default_mode
        self._prompts = prompts
        self._queue = queue
        self._placing = placing
        self._runner = runner
        self._retry = retry
        self._suspects = suspects
        self._decisions = decisions
        self._request_log = request_log
        self._usage = usage
        self._budgets = budgets
        self._tracing = tracing
        self._headers = response_headers.of
        self.in_flight: set[RequestContext] = set()

    async def serve(self, http_request: HttpRequest) -> None:
        """Serve one request from its complete body to the end of its response."""
        now = self._now()
        client = http_request.head.client
        facts = with_primary_name(await self._prompts.read(http_request), self._cluster)
        facts = salted(facts, client.key, client.secret)
        ends_at = now + self._settings.request_s_max
        context = RequestContext(
            http_request=http_request,
            facts=facts,
            inbox=self._inbox,
            timings=Timings(started_at=now),
            ends_at=ends_at,
            deadline_at=ends_at,
            resumes_max=resumes_allowed(self._settings.resumes_max, facts.options.resumes_max),
            why_not_resumable=why_not_resumable(facts),
            answer_id=secrets.token_hex(ID_BYTES) if facts.path == RESPONSES and facts.stream else "",
        )
        http_request.on_left.append(context.client_left)
        if http_request.left:
            context.client_left()
        self.in_flight.add(context)
        try:
            self._tracing.begin(context)
            await self._serve(context)
        finally:
            self.in_flight.discard(context)
            http_request.on_left.remove(context.client_left)
            context.close()
            now = self._now()
            finished = self._request_log.finished(context, now)
            self._decisions.finished(context, finished)
            used = used_by(context, finished, now)
            settle(context, used, now)
            self._usage.ended(context, finished, used)

    async def _serve(self, context: RequestContext) -> None:
        facts, head = context.facts, context.http_request.head
        key = head.client.key
        mode = default_or_requested(facts, head.mode or Mode.AUTO, self._default_mode.mode)
        headers = RequestHeaders(
            mode=mode, class_name=head.class_name, tenant=key.tenant or head.tenant, key=key, is_batch=head.is_batch
        )
        if (fault := self._policy.fault(facts, headers, self._cluster.workers)) is not None:
            self._refuse(context, refused_field(fault))
            return
        if (too_many := too_many_sequences(context, self._settings.sequences_max)) is not None:
            self._refuse(context, too_many)
            return
        has_gaps = facts.path not in PLACED or self._cluster.has_attached
        if has_gaps and (unserved := self._path_fault(context)) is not None:
            self._refuse(context, unserved)
            return
        if (refused := self._suspects.refusal(context)) is not None:
            self._fail(context, refused)
            return
        begun = self._now()
        context.prompt = prompt = await self._prompts.of(context.http_request, facts)
        ended = self._now()
        context.timings.tokenize_s = ended - begun
        context.mark(SpanName.TOKENIZE, begun, ended)
        if context.http_request.left:
            self._fail(context, CLIENT_LEFT)
            return
        over = self._budgets.refusal(head.client) or charge(context, prompt.tokens, ended)
        if over is not None:
            self._refuse(context, over)
            return
        request = self._policy.placement_request(facts, headers, prompt.tokens, prompt.hashes, prompt.unsplittable)
        if context.not_serving:
            request = msgspec.structs.replace(request, excluded=context.not_serving)
        entry = QueueEntry(request, context.timings.started_at, context.ends_at)
        try:
            await self._serve_in_turn(context, request, entry)
        finally:
            self._queue.ended(entry, context)

    def _path_fault(self, context: RequestContext) -> HttpError | None:
        """404 when no engine serves the path of the request; else notes which do not."""
        facts = context.facts
        lacking = self._cluster.not_serving(facts.path, facts.model)
        if lacking is None:
            return path_not_served(facts.path, facts.model)
        context.not_serving = lacking
        return None

    async def _serve_in_turn(self, context: RequestContext, request: PlacementRequest, entry: QueueEntry) -> None:
        """Wait in the admission queue, then try until an attempt succeeds; further attempts do not queue again."""
        lost: LegFailed | None = None
        placement = await self._placing.first(context, entry)
        timings = context.timings
        while True:
            self._decisions.made(context, request, placement)
            if isinstance(placement, Rejection):
                self._reject(context, placement, lost)
                return
            begun, place_s = self._now(), timings.place_s
            lost = await self._attempt(context, placement)
            if lost is None:
                self._suspects.cleared(context)
                return
            self._decisions.failed(context, lost.failure)
            found = await self._retry.next_attempt(context, request, lost)
            if isinstance(found, Failure):
                self._fail(context, found)
                return
            timings.failed_s += max(0.0, self._now() - begun - (timings.place_s - place_s))
            request, placement = found

    async def _attempt(self, context: RequestContext, placement: Placement) -> LegFailed | None:
        """Run the legs. Returns why they failed, or None when the client has its response."""
        context.begin_attempt(placement)
        try:
            await self._runner.run(context, placement)
        except LegFailed as lost:
            return lost
        except BusDown as error:
            return LegFailed(Failure(reason=Reason.BUS_DOWN, message=str(error)))
        except MessageTooLarge as error:
            return LegFailed(Failure(reason=Reason.TOO_LARGE, message=str(error)))
        except EngineRefused as error:
            if error.status == SERVICE_UNAVAILABLE and context.may_retry(self._settings.attempts_max):
                return LegFailed(ENGINE_FULL, error.worker_id)
            if context.http_request.begun:
                return LegFailed(Failure(reason=Reason.CANNOT_RESUME, message=error.as_text()), error.worker_id)
            self._pass_on(context, placement, error)
        return None

    def _pass_on(self, context: RequestContext, placement: Placement, error: EngineRefused) -> None:
        """Send the engine's own error unchanged."""
        context.status = error.status
        context.reason = "engine_refused"
        headers = self._headers(context, placement, error.content_type)
        context.http_request.answer(error.status, headers, error.body)

    def _reject(self, context: RequestContext, rejection: Rejection, lost: LegFailed | None) -> None:
        """No worker can serve the request. A deadline that ended the last attempt, or an unreadable body, says more
        than that.
        """
        if context.http_request.left:
            self._fail(context, CLIENT_LEFT)
        elif lost is not None and lost.failure.reason is Reason.DEADLINE:
            self._fail(context, lost.failure)
        elif context.facts.body is None:
            self._refuse(context, bad_request("The body is not a JSON object."))
        else:
            self._refuse(context, failed(rejection.reason, rejection.message, rejection.retry_after_s))

    def _fail(self, context: RequestContext, failure: Failure) -> None:
        """End a request that failed: with a status, with a stream's last event, or silently if the client has left."""
        http_request = context.http_request
        left, reason = http_request.left, failure.reason
        if left:
            reason = Reason.CLIENT_SLOW if http_request.slow else Reason.CANCELLED
        if not http_request.begun and not left:
            self._refuse(context, failed(reason, failure.message, failure.retry_after_s))
            return
        context.status = HTTP_STATUS[reason]
        context.reason = str(reason)
        if not left and not http_request.ended:
            http_request.end(error_event(context.facts.path, reason, failure.message))

    def _refuse(self, context: RequestContext, error: HttpError) -> None:
        context.status = error.status
        context.reason = error.reason
        context.http_request.refuse(error, context.decision_headers())
