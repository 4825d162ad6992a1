"""What follows a failed attempt: the recovery actions of the failure policy, tried in order, unless an engine may have
died of the request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from services.router.admission.bus_health import BUS_UNREACHABLE, CHECK_S_MAX, CHECK_S_MIN, BusHealth
from services.router.admission.placing import Placing, lacks_worker
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.relay.failure_policy import (
    MAY_FREE_SOON,
    WORKER_UNUSABLE,
    FailureKind,
    FailurePolicy,
    Recovery,
    RecoveryAction,
    kind_of,
)
from services.router.relay.migration import continued
from services.router.relay.suspects import Suspects
from services.router.request.context import RequestContext, Served
from services.router.request.facts import Mode
from services.router.state.cluster_view import ClusterView
from services.router.state.worker_view import WorkerView
from services.router.telemetry.request_log import RequestLog
from services.router.tokenize.prompts import Prompts
from shared.bus.leg_inbox import LegFailed, LegInbox
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.workers import Role

NextAttempt = tuple[PlacementRequest, Placement | Rejection]
"""The placement of the next attempt, or why there is none; and the request it was made for."""

NO_SUBSTITUTE: Final = Rejection(
    reason=Reason.NO_WORKER,
    message="No ready worker can take over from the one that failed. Try again shortly.",
    retry_after_s=1.0,
)


class Retry:
    """Decides whether and where a failed request is tried again."""

    def __init__(  # noqa: PLR0913  # wiring
        self,
        *,
        now: Callable[[], float],
        policy: FailurePolicy,
        placing: Placing,
        cluster: ClusterView,
        bus_health: BusHealth,
        inbox: LegInbox,
        prompts: Prompts,
        request_log: RequestLog,
        suspects: Suspects,
    ) -> None:
        self._now = now
        self._attempts_max = policy.attempts_max
        self._policy = policy
        self._placing = placing
        self._cluster = cluster
        self._bus_health = bus_health
        self._inbox = inbox
        self._prompts = prompts
        self._request_log = request_log
        self._suspects = suspects

    async def next_attempt(self, context: RequestContext, lost: LegFailed) -> NextAttempt | Failure:
        """After ``lost`` ended an attempt: the next one, or the failure to send to the client."""
        request, begun, failure = context.request, context.http_request.begun, lost.failure
        assert request is not None
        if (blamed := await self._suspects.blame(context, lost)) is not None:
            context.give_up(blamed)
            return blamed
        if lost.by_bus or failure.reason is Reason.WORKER_DRAINING:
            context.excuse()
        kind = kind_of(
            failure.reason,
            prefill=failed_in_prefill(context, lost),
            answering=context.answering,
            after_prefill=context.placement is not None and context.placement.prefill is not None,
        )
        over = context.http_request.left or self._inbox.closed or self._now() >= context.ends_at
        if kind is None or over or not context.may_retry(self._attempts_max):
            return cannot_resume(failure, context.why_not_resumable()) if begun and kind is not None else failure
        recovery = self._policy.recovery(kind if self._bus_health.reachable else FailureKind.BUS_DOWN, begun=begun)
        if not recovery.actions:
            return failure
        self._note(context, lost, kind)
        self._request_log.retried(failure.reason, resumed=begun)
        context.give_up(failure)
        if begun:
            context.timings.broke_at = context.timings.last_at
            request = await self._rest_of_stream(context, request)
        found = await self._find(context, request, recovery)
        if isinstance(found[1], Rejection) and begun:
            if found[1] is BUS_UNREACHABLE:
                failure = msgspec.structs.replace(failure, reason=Reason.BUS_DOWN)
            return cannot_resume(failure, found[1].message)
        return found

    async def _find(self, context: RequestContext, request: PlacementRequest, recovery: Recovery) -> NextAttempt:
        """Try the actions, again and again until its wait is over if it has one."""
        bus_health, http_request = self._bus_health, context.http_request
        until = min(self._now() + recovery.wait_s, context.ends_at)
        check_s = CHECK_S_MIN
        while True:
            if not bus_health.reachable:
                if not http_request.begun:
                    until = min(bus_health.wait_ends(context.timings.started_at), context.ends_at)
                if not (recovery.wait_s and await bus_health.wait_reachable(context, until)):
                    return request, BUS_UNREACHABLE
            found = self._try(context, request, recovery)
            now = self._now()
            if isinstance(found[1], Placement) or http_request.left:
                return found
            if now >= min(until, context.ends_at):
                is_away = lacks_worker(found[1]) and self._cluster.is_away(request.model)
                return (request, BUS_UNREACHABLE) if is_away else found
            await bus_health.pause(context, min(check_s, until - now))
            check_s = min(2 * check_s, CHECK_S_MAX)
            context.busy_workers.clear()  # They may have room again.

    def _try(self, context: RequestContext, request: PlacementRequest, recovery: Recovery) -> NextAttempt:
        """The first action that placement can carry out; else the first rejection."""
        without = excluded(context.failed_workers, self._cluster.workers, context.like)
        without |= context.busy_workers | context.not_serving
        rejected: NextAttempt | None = None
        declined = context.declined_by
        for avoided in (without | declined, without) if declined else (without,):
            for action in recovery.actions:
                for wanted in requests_for(request, action, avoided):
                    placement = self._placing.again(context, wanted)
                    if isinstance(placement, Rejection):
                        rejected = rejected or (wanted, placement)
                    elif suits(action, placement):
                        return wanted, placement
        return rejected or (request, NO_SUBSTITUTE)

    def _note(self, context: RequestContext, lost: LegFailed, kind: FailureKind) -> None:
        """Remember which worker this request avoids, for good or until it has room; or which worker all requests avoid
        until it reports, because NATS has nobody there.
        """
        placement = context.placement
        if context.like is None and placement is not None and context.http_request.begun:
            context.like = Served.by(placement.decode, context.facts.model)
        if lost.worker_id is None or placement is None:
            return
        view = placement.view(lost.worker_id)
        if lost.by_bus:
            if view is not None and lost.failure.reason is Reason.WORKER_LOST:
                self._cluster.unheard(lost.worker_id, view.record.epoch)
            return
        if kind is FailureKind.CACHE_MISSED and placement.mode is not Mode.DECODE_FIRST:
            context.declined_by = frozenset((lost.worker_id,))
            return
        if kind in MAY_FREE_SOON:
            context.busy_workers.add(lost.worker_id)
            return
        if lost.failure.reason not in WORKER_UNUSABLE:
            return
        if view is not None:
            context.failed_workers[lost.worker_id] = view.record.epoch

    async def _rest_of_stream(self, context: RequestContext, request: PlacementRequest) -> PlacementRequest:
        """The request whose prompt includes the tokens that the client has received."""
        prompt = await self._prompts.of(context.http_request, context.facts, context.relayed)
        return continued(request, prompt.tokens, prompt.hashes, len(context.relayed))


def failed_in_prefill(context: RequestContext, lost: LegFailed) -> bool:
    prefill = context.placement.prefill if context.placement is not None else None
    return prefill is not None and prefill.record.worker_id == lost.worker_id


def cannot_resume(failure: Failure, why: str) -> Failure:
    """The failure as the client of a broken stream reads it."""
    message = (
        f"{failure.message.removesuffix('.')}; and the stream could not be resumed: {why}" if why else failure.message
    )
    return msgspec.structs.replace(failure, message=message)


def excluded(
    failed: Mapping[WorkerId, Epoch], views: Mapping[WorkerId, WorkerView], like: Served | None
) -> frozenset[WorkerId]:
    """Workers that may not serve the next attempt: those that failed it and have not restarted since, and for a stream
    that has begun, those that would serve another model than ``like``, or cannot continue after tokens.
    """
    out = {name for name, epoch in failed.items() if name in views and views[name].record.epoch <= epoch}
    if like is not None:
        out |= {name for name, view in views.items() if view.record.attached or not like.same_on(view)}
    return frozenset(out)


def requests_for(
    request: PlacementRequest, action: RecoveryAction, without: frozenset[WorkerId]
) -> tuple[PlacementRequest, ...]:
    """What to ask placement for, in order, to carry out this action."""
    replace = msgspec.structs.replace
    if action is RecoveryAction.BOUNCE_TO_PREFILL:
        if not request.may_decode_first:  # It was bounced once: a second bounce would end the same way.
            return ()
        if request.mode is Mode.DECODE_FIRST:  # The client's threshold has had its effect.
            request = replace(request, mode=Mode.AUTO, cache_hit_threshold=None)
        return (replace(request, may_decode_first=False, excluded=without),)
    again = replace(request, excluded=without)
    if action is RecoveryAction.PREFILL_ON_DECODE:
        if request.mode is Mode.DISAGGREGATED:  # The client has ruled out one worker for both.
            return ()
        return (replace(again, mode=Mode.AGGREGATED),)
    if action is RecoveryAction.RESUME:
        # The workers that the client has forced may be gone: finishing the stream matters more than where.
        return (again, replace(again, mode=Mode.AUTO, forced=None))
    return (again,)


def suits(action: RecoveryAction, placement: Placement) -> bool:
    if action in (RecoveryAction.ANOTHER_PREFILL, RecoveryAction.BOUNCE_TO_PREFILL):
        return placement.prefill is not None or placement.decode.record.role is not Role.DECODE
    return True
