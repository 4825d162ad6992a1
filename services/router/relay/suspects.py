"""Requests that an engine may have died of: which these are, and that no other engine gets them (DECISIONS 40).

Silence is not a death. A worker that is lost because it fell silent may be frozen or cut off, or its process may have
ended. It has ended if NATS has no listener for it any more, or if a later life of it has registered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from services.router.feeds.reservations import ReservationFeed
from services.router.request.context import RequestContext
from services.router.state.cluster_view import ClusterView
from services.router.state.quarantine import Life, Quarantine, digest_of
from services.router.state.worker_view import WorkerView
from services.router.telemetry.request_log import RequestLog
from shared.bus.leg_inbox import LegFailed, LegInbox
from shared.contracts.failures import Failure, Reason

log = logging.getLogger("baton.router")

DEATHS_MAX: Final = 1
"""Engines that a request may lose before it is quarantined, where they had generated tokens for it or the cause of the
loss is unknown.
"""
TOGETHER_S: Final = 1.5
"""Workers that fall silent within this time have one cause outside of them. A request that kills one after the other
needs longer: it is tried again when the first has been silent for three seconds, and live workers report each second.
"""


class Suspects:
    """Decides whether an engine may have died of a request, and keeps such requests from the next engine.

    ``refusal`` is asked before a request is placed, ``blame`` when a leg has failed.
    """

    def __init__(  # wiring
        self,
        quarantine: Quarantine,
        reservations: ReservationFeed,
        request_log: RequestLog,
        cluster: ClusterView,
        inbox: LegInbox,
        now: Callable[[], float],
    ) -> None:
        self._quarantine = quarantine
        self._reservations = reservations
        self._request_log = request_log
        self._cluster = cluster
        self._inbox = inbox
        self._now = now

    def refusal(self, context: RequestContext) -> Failure | None:
        """Why the request is refused; None when it is not. Costs nothing while no request is remembered."""
        if not self._quarantine.entries:
            return None
        context.digest = self._digest(context)
        left_s = self._quarantine.refused_s(context.digest, self._now())
        if not left_s:
            return None
        message = (
            "An engine died while it computed this request, which may be the cause: it is refused for "
            f"{left_s:.0f} s more. Change it, or send it again after that."
        )
        return Failure(reason=Reason.QUARANTINED, message=message)

    async def blame(self, context: RequestContext, lost: LegFailed) -> Failure | None:
        """The failure to end the request with, when no other engine should get it; None when one may."""
        failure = lost.failure
        lives: list[Life] = []
        if failure.reason is Reason.ENGINE_DEAD:
            context.deaths += 1
        elif failure.reason is Reason.WORKER_LOST and failure.suspect and not context.answering:
            self._note_silence(context, lost)
        else:
            return None
        if not (failure.reason is Reason.ENGINE_DEAD and failure.suspect):
            if context.deaths + len(context.silences) <= DEATHS_MAX:
                return None
            ended, lives = await self._ended(context)
            if context.deaths + ended <= DEATHS_MAX:
                return None
        digest = context.digest or self._digest(context)
        for_s = self._quarantine.add(digest, self._now(), lives)
        self._reservations.quarantined(digest, for_s, lives)
        self._request_log.quarantined()
        head = context.http_request.head
        log.warning(
            "request %s is quarantined for %.0f s: an engine died while it computed it (%s, tenant %s, digest %s): %s",
            head.request_id, for_s, lost.worker_id, head.tenant_of_key() or "-",
            digest.hex(), failure.message,
        )  # fmt: skip
        message = (
            f"The engine died while it computed this request, which may be the cause ({failure.message}): no other "
            f"engine gets it, and the same request is refused for {for_s:.0f} s"
        )
        return Failure(reason=Reason.ENGINE_DEAD, message=message)

    def cleared(self, context: RequestContext) -> None:
        """The request has ended well."""
        if context.digest:
            self._quarantine.succeeded(context.digest)

    def _note_silence(self, context: RequestContext, lost: LegFailed) -> None:
        placement = context.placement
        if placement is None or lost.worker_id is None:
            return
        if (view := placement.view(lost.worker_id)) is not None:
            context.silences.append((view, view.heard_at))

    async def _ended(self, context: RequestContext) -> tuple[int, list[Life]]:
        """How many of the workers that were lost with this request have ended, as far as is known; and those of them
        that may still report again.
        """
        restarted = 0
        gone: list[tuple[WorkerView, float]] = []
        for view, heard_at in context.silences:
            known = self._cluster.workers.get(view.record.worker_id)
            if known is not None and known.record.epoch > view.record.epoch:
                restarted += 1
            elif (known is not None and known.heard_at > heard_at) or await self._inbox.has_listener(
                view.record.worker_id
            ):
                continue
            else:
                gone.append((view, heard_at))
        times = [heard_at for _, heard_at in gone]
        alone = [
            view for view, heard_at in gone if sum(abs(heard_at - other) < TOGETHER_S for other in times) == 1
        ]  # It counts itself.
        return restarted + len(alone), [(view.record.worker_id, view.record.epoch) for view in alone]

    def _digest(self, context: RequestContext) -> bytes:
        http_request = context.http_request
        return digest_of(http_request.head.path, http_request.upload.body())
