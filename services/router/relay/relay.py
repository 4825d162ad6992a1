"""Serves a request: places it, runs its legs, retries it when they fail, and answers with an error when nothing helps.

    begin ──► check ──► admit ──► try ──► legs, which call back ──► over ──► finish
           1         2         3   ▲                                 │
                                   └────────── try again ◄── 4 ──────┘

A request is a chain of plain calls for as long as it waits for nothing. Where it waits, a task continues the chain:

1. ``read-request``: a large body is read in a thread.
2. ``read-prompt``: a long prompt is tokenized in a thread, or a worker renders it.
3. ``admit``: the request waits in the admission queue, for NATS, or for a model that sleeps.
4. ``retry``: the failure policy waits for a worker that can take over.

Within an attempt (``attempt.py``), ``start-leg`` waits for the bus and ``wait-for-client`` for a client that reads
slowly. From each step a request that is refused or has failed goes to ``finish``, which accounts for it.

So a wait has two forms. The one that ends in ``_now`` (``Prompts.read_now``, ``Placing.first_now``,
``LegInbox.start_now``) answers at once, or with None where the other form, a coroutine, must follow. Most requests wait
for nothing, and a chain of plain calls is what the compiler gains from: both together halved a request's CPU (0.55
times at 64 connections, see docs/benchmarks/router.md), and compiled coroutines gained nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

import msgspec

from services.router.admission.admission_queue import AdmissionQueue
from services.router.admission.placing import Placing
from services.router.admission.prefetches import Prefetches
from services.router.admission.queues import QueueEntry
from services.router.auth.api_keys import salted
from services.router.decisions.decision_service import DecisionService
from services.router.feeds.default_mode import DefaultModeFeed
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.placement.policy import RequestPolicy
from services.router.relay.accounting import Accounting
from services.router.relay.attempt import Attempt
from services.router.relay.charging import charge, settle, too_many_sequences, used_by
from services.router.relay.failure_policy import FailurePolicy
from services.router.relay.migration import resumes_allowed
from services.router.relay.prefetch_answer import prefetch_answer, prefetch_headers
from services.router.relay.request_tasks import RequestTasks
from services.router.relay.retry import Retry
from services.router.relay.running_leg import EngineRefused, LegServices, NotAnswered
from services.router.relay.suspects import Suspects
from services.router.request.context import CLIENT_LEFT, RequestContext, ResponseHeaders
from services.router.request.errors import bad_request, error_event, failed, path_not_served, refused_field
from services.router.request.facts import Mode, RequestFacts
from services.router.request.http_request import HttpRequest
from services.router.request.mode import default_or_requested
from services.router.request.model_name import with_primary_name
from services.router.request.prompt import Prompt
from services.router.settings import Settings
from services.router.state.cluster_view import ClusterView
from services.router.telemetry.tracing import Tracing
from services.router.tokenize.prompts import Prompts, UnreadPrompt
from services.router.usage import Budgets
from shared.bus.leg_inbox import LegFailed, LegInbox
from shared.bus.port import BusDown, MessageTooLarge
from shared.contracts.engine_paths import PLACED
from shared.contracts.failures import HTTP_STATUS, Failure, Reason
from shared.contracts.request_body import no_threshold_message
from shared.http.errors import HttpError
from shared.telemetry.span_names import SpanName

TOKENIZE: Final = SpanName.TOKENIZE
AUTO: Final = Mode.AUTO

log = logging.getLogger("baton.router")

OK: Final = 200
SERVICE_UNAVAILABLE: Final = 503
ENGINE_FULL: Final = Failure(reason=Reason.WORKER_BUSY, message="the engine takes no requests")


class Relay:
    """Serves requests side by side."""

    def __init__(  # noqa: PLR0913  # wiring
        self,
        *,
        settings: Settings,
        now: Callable[[], float],
        inbox: LegInbox,
        cluster: ClusterView,
        policy: RequestPolicy,
        failures: FailurePolicy,
        default_mode: DefaultModeFeed,
        prompts: Prompts,
        queue: AdmissionQueue,
        placing: Placing,
        legs: LegServices,
        retry: Retry,
        suspects: Suspects,
        decisions: DecisionService,
        prefetches: Prefetches,
        accounting: Accounting,
        budgets: Budgets,
        tracing: Tracing,
        response_headers: ResponseHeaders,
        tasks: RequestTasks,
    ) -> None:
        self._settings = settings
        self._failures = failures
        self._now = now
        self._inbox = inbox
        self._cluster = cluster
        self._policy = policy
        self._default_mode = default_mode
        self._prompts = prompts
        self._queue = queue
        self._placing = placing
        self._legs = legs
        self._retry = retry
        self._suspects = suspects
        self._decisions = decisions
        self._prefetches = prefetches
        self._accounting = accounting
        self._budgets = budgets
        self._tracing = tracing
        self._headers = response_headers.of
        self._tasks = tasks
        self.in_flight: set[RequestContext] = set()

    async def serve(self, http_request: HttpRequest) -> None:
        """Serve one request from its complete body to the end of its response. Cancelled, the client counts as gone."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begin(http_request, partial(_set_ended, ended))
        try:
            await ended
        except asyncio.CancelledError:
            http_request.client_left()
            raise

    def begin(self, http_request: HttpRequest, on_end: Callable[[], None]) -> None:
        """Serve one request whose body is complete; ``on_end`` is called at its end, perhaps before this returns."""
        now = self._now()
        ends_at = now + self._settings.request_s_max
        context = RequestContext(
            http_request=http_request, inbox=self._inbox, started_at=now, ends_at=ends_at, on_end=on_end
        )
        http_request.on_left.append(context.client_left)
        self.in_flight.add(context)
        try:
            if http_request.left:
                context.client_left()
            self._tracing.begin(context)
            facts = self._prompts.read_now(http_request)
            if facts is None:
                self._later(context, self._read(context), "read-request")
            else:
                self._check(context, facts)
        except Exception as bug:
            self._crashed(context, bug)

    async def _read(self, context: RequestContext) -> None:
        self._check(context, await self._prompts.read(context.http_request))

    def _check(self, context: RequestContext, facts: RequestFacts) -> None:
        """Check what the request asks for, and read its prompt."""
        head = context.http_request.head
        key = head.client.key
        facts = with_primary_name(facts, self._cluster)
        if head.client.secret:
            facts = salted(facts, key, head.client.secret)
        context.read(
            facts, resumes_allowed(self._failures.resumes_max, facts.options.resumes_max), self._settings.stream_ping_s
        )
        mode = default_or_requested(facts, head.mode or AUTO, self._default_mode.mode)
        if (fault := self._policy.fault(facts, head, self._cluster.workers)) is not None:
            self._refuse(context, refused_field(fault))
            return
        if (too_many := too_many_sequences(context, self._settings.sequences_max)) is not None:
            self._refuse(context, too_many)
            return
        has_gaps = facts.path not in PLACED or self._cluster.has_attached
        if has_gaps and (unserved := self._path_fault(context)) is not None:
            self._refuse(context, unserved)
            return
        if facts.cache_hit_threshold and (unable := self._threshold_fault(context)) is not None:
            self._refuse(context, unable)
            return
        if (refused := self._suspects.refusal(context)) is not None:
            self._fail(context, refused)
            return
        begun_at = self._now()
        prompt = self._prompts.begin(context.http_request, facts)
        if isinstance(prompt, UnreadPrompt):
            self._later(context, self._read_prompt(context, mode, prompt, begun_at), "read-prompt")
        else:
            self._admit(context, mode, prompt, begun_at)

    async def _read_prompt(self, context: RequestContext, mode: Mode, unread: UnreadPrompt, begun_at: float) -> None:
        self._admit(context, mode, await self._prompts.finish(unread), begun_at)

    def _admit(self, context: RequestContext, mode: Mode, prompt: Prompt, begun_at: float) -> None:
        """Charge the request, and place it as soon as an engine would begin it."""
        facts, timings, ended_at = context.facts, context.timings, self._now()
        context.prompt = prompt
        timings.tokenize_s = ended_at - begun_at
        context.mark(TOKENIZE, begun_at, ended_at)
        if context.http_request.left:
            self._fail(context, CLIENT_LEFT)
            return
        over = self._budgets.refusal(context.http_request.head.client) or charge(context, prompt, ended_at)
        if over is not None:
            self._refuse(context, over)
            return
        request = self._policy.placement_request(
            facts, context.http_request.head, mode, prompt.tokens, prompt.hashes, prompt.unsplittable
        )
        if context.not_serving:
            request = msgspec.structs.replace(request, excluded=context.not_serving)
        context.request = request
        if facts.options.prefetch:
            self._later(context, self._prefetch(context, request), "prefetch")
            return
        context.entry = entry = QueueEntry(request, timings.started_at, context.ends_at)
        placement = self._placing.first_now(context, entry)
        if placement is None:
            self._later(context, self._wait_for_placement(context, entry), "admit")
        else:
            self._try(context, placement, None)

    async def _wait_for_placement(self, context: RequestContext, entry: QueueEntry) -> None:
        self._try(context, await self._placing.first(context, entry), None)

    async def _prefetch(self, context: RequestContext, request: PlacementRequest) -> None:
        """Answer with what the worker has read to which the next turn would go now."""
        placement = self._placing.again(context, request)
        self._decisions.made(context, placement)
        if isinstance(placement, Rejection):
            self._reject(context, placement, None)
            return
        await self._prefetches.fetch(context, placement)
        if context.http_request.left:
            self._fail(context, CLIENT_LEFT)
            return
        context.status = OK
        context.http_request.answer(OK, prefetch_headers(context), prefetch_answer(context, placement))
        self._finish(context)

    def _path_fault(self, context: RequestContext) -> HttpError | None:
        """404 when no engine serves the path of the request; else notes which do not."""
        facts = context.facts
        lacking = self._cluster.not_serving(facts.path, facts.model)
        if lacking is None:
            return path_not_served(facts.path, facts.model)
        context.not_serving = lacking
        return None

    def _threshold_fault(self, context: RequestContext) -> HttpError | None:
        """400 when no worker of the model can refuse a request by what is cached; else notes which cannot."""
        model = context.facts.model
        lacking = self._cluster.without_threshold(model)
        if lacking is None:
            who = f"No worker of the model `{model}`" if model else "No worker"
            return bad_request(no_threshold_message(who), "cache_hit_threshold")
        context.not_serving |= lacking
        return None

    def _try(self, context: RequestContext, placement: Placement | Rejection, lost: LegFailed | None) -> None:
        """Run an attempt, unless it was rejected. ``lost``: why the one before failed."""
        self._decisions.made(context, placement)
        if isinstance(placement, Rejection):
            self._reject(context, placement, lost)
            return
        context.begin_attempt(placement, self._now())
        Attempt(self._legs, context, placement, self._over, self._crashed).begin()

    def _over(self, context: RequestContext, error: NotAnswered | None) -> None:
        """An attempt has ended: with the response, or because of ``error``."""
        lost = None if error is None else self._lost(context, error)
        if lost is None:
            self._suspects.cleared(context)
            self._finish(context)
        else:
            self._decisions.failed(context, lost.failure)
            self._later(context, self._try_again(context, lost), "retry")

    async def _try_again(self, context: RequestContext, lost: LegFailed) -> None:
        """Further attempts do not wait in the admission queue again."""
        timings = context.timings
        context.broke_off(self._now() + self._settings.request_s_max)
        placed_s = timings.place_s
        found = await self._retry.next_attempt(context, lost)
        if isinstance(found, Failure):
            self._fail(context, found)
            return
        timings.failed_s += max(0.0, self._now() - context.tried_at - (timings.place_s - placed_s))
        context.request, placement = found
        self._try(context, placement, lost)

    def _lost(self, context: RequestContext, error: NotAnswered) -> LegFailed | None:
        """What the next attempt must know of the failure; None when the client gets the engine's own error."""
        if isinstance(error, LegFailed):
            return error
        if isinstance(error, BusDown):
            return LegFailed(Failure(reason=Reason.BUS_DOWN, message=str(error)), by_bus=True)
        if isinstance(error, MessageTooLarge):
            return LegFailed(Failure(reason=Reason.TOO_LARGE, message=str(error)))
        if error.status == SERVICE_UNAVAILABLE and context.may_retry(self._failures.attempts_max):
            return LegFailed(ENGINE_FULL, error.worker_id)
        if context.http_request.begun:
            return LegFailed(Failure(reason=Reason.CANNOT_RESUME, message=error.as_text()), error.worker_id)
        self._pass_on(context, error)
        return None

    def _later(self, context: RequestContext, work: Coroutine[Any, Any, None], name: str) -> None:
        """Continue the chain in a task."""
        self._tasks.spawn(context, work, name).add_done_callback(partial(self._continued, context))

    def _continued(self, context: RequestContext, task: asyncio.Task[None]) -> None:
        """A task of the chain has ended, perhaps without having begun."""
        if task.cancelled():  # The router ends.
            self._finish(context)
        elif (bug := task.exception()) is not None:
            self._crashed(context, bug)

    def _crashed(self, context: RequestContext, bug: BaseException) -> None:
        """A bug ends its request, not the process."""
        log.error("a request failed with an internal error", exc_info=bug)
        context.status, context.reason = HTTP_STATUS[Reason.INTERNAL], str(Reason.INTERNAL)
        context.http_request.crash()
        self._finish(context)

    def _finish(self, context: RequestContext) -> None:
        """The request has ended: account for it, once."""
        if context not in self.in_flight:
            return
        self.in_flight.discard(context)
        context.http_request.on_left.remove(context.client_left)
        context.close()
        try:
            if context.entry is not None:
                self._queue.ended(context.entry, context)
            now = self._now()
            used = used_by(context, now)
            settle(context, used, now)
            self._accounting.add(context, now, used)
        finally:
            context.on_end()

    def _pass_on(self, context: RequestContext, error: EngineRefused) -> None:
        """Send the engine's own error unchanged."""
        assert context.placement is not None
        context.status = error.status
        context.reason = "engine_refused"
        headers = self._headers(context, context.placement, error.content_type)
        context.http_request.answer(error.status, headers, error.body)

    def _reject(self, context: RequestContext, rejection: Rejection, lost: LegFailed | None) -> None:
        """No worker can serve the request. A deadline that ended the last attempt, or an unreadable body, says more
        than that; an outage of NATS says more than a deadline.
        """
        is_away = rejection.reason is Reason.BUS_DOWN
        if context.http_request.left:
            self._fail(context, CLIENT_LEFT)
        elif lost is not None and lost.failure.reason is Reason.DEADLINE and not is_away:
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
            http_request.end(
                error_event(context.facts.path, reason, failure.message, context.response_id, context.newest)
            )
        self._finish(context)

    def _refuse(self, context: RequestContext, error: HttpError) -> None:
        context.status = error.status
        context.reason = error.reason
        context.http_request.refuse(error, context.decision_headers())
        self._finish(context)


def _set_ended(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)
