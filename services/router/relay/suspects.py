"""Decides whether an engine may have died of a request, and keeps such requests from the next engine (DECISIONS 40)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from services.router.relay.request_context import RequestContext
from services.router.state.feeds import ReservationFeed
from services.router.state.quarantine import Quarantine, digest_of
from services.router.telemetry.request_log import RequestLog
from shared.bus.leg_inbox import LegFailed
from shared.contracts.failures import Failure, Reason

log = logging.getLogger("baton.router")

DEATHS_MAX = 1
"""Engines that a request may lose while it is not under suspicion: those that had generated tokens for it, and workers
of which is not known why they are gone.
"""


class Suspects:
    """``refusal`` is asked before a request is placed, ``blame`` when a leg has failed."""

    def __init__(
        self, quarantine: Quarantine, reservations: ReservationFeed, request_log: RequestLog, now: Callable[[], float]
    ) -> None:
        self._quarantine = quarantine
        self._reservations = reservations
        self._request_log = request_log
        self._now = now

    def refusal(self, context: RequestContext) -> Failure | None:
        """Why the request is refused; None when it is not. Costs nothing while no request is remembered."""
        if not self._quarantine:
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

    def blame(self, context: RequestContext, lost: LegFailed) -> Failure | None:
        """The failure to end the request with, when no other engine should get it; None when one may."""
        failure = lost.failure
        died = failure.reason is Reason.ENGINE_DEAD
        if not died and not (failure.reason is Reason.WORKER_LOST and failure.suspect and not context.answering):
            return None
        context.deaths += 1
        if not (died and failure.suspect) and context.deaths <= DEATHS_MAX:
            return None
        digest = context.digest or self._digest(context)
        for_s = self._quarantine.add(digest, self._now())
        self._reservations.quarantined(digest, for_s)
        self._request_log.quarantined()
        head = context.http_request.head
        log.warning(
            "request %s is quarantined for %.0f s: an engine died while it computed it (%s, tenant %s, digest %s): %s",
            head.request_id, for_s, lost.worker_id, head.client.key.tenant or head.tenant or "-",
            digest.hex(), failure.message,
        )  # fmt: skip
        message = (
            f"The engine died while it computed this request, which may be the cause ({failure.message}): no other "
            f"engine gets it, and the same request is refused for {for_s:.0f} s"
        )
        return Failure(reason=Reason.ENGINE_DEAD, message=message)

    def cleared(self, context: RequestContext) -> None:
        """The request has ended well."""
        if context.digest and self._quarantine:
            self._quarantine.succeeded(context.digest)

    def _digest(self, context: RequestContext) -> bytes:
        http_request = context.http_request
        return digest_of(http_request.head.path, http_request.upload.body())
