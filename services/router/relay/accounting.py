"""Accounts for requests that have ended, many at a time: in metrics, log, decisions, and the usage of API keys.

One at a time would take longer, because other work has emptied the processor's caches in between. What answers for
requests that have ended (metrics, decisions, budgets) calls ``catch_up`` first, so that nobody sees the delay.
"""

from __future__ import annotations

import logging
from typing import Final

from services.router.decisions.decision_service import DecisionService
from services.router.request.context import RequestContext
from services.router.telemetry.request_log import RequestLog
from services.router.usage import UsageLog

log = logging.getLogger("baton.router")

ENDED_AT_ONCE_MAX: Final = 32
"""Maximum number of ended requests that wait: accounting for more would hold up the streams of the event loop."""


class Ended:
    """A request that has ended."""

    def __init__(self, context: RequestContext, at: float, used: tuple[int, int], decoding: list[float] | None) -> None:
        self.context = context
        self.at = at
        self.used = used
        """Prompt and completion tokens."""
        self.decoding = decoding
        """The decode worker's row of the fleet table at ``at``; None: the worker is gone, or there is none."""


class Accounting:
    """``add`` accounts for a request soon: with the next report to the collector, or when many have ended."""

    def __init__(self, request_log: RequestLog, decisions: DecisionService, usage: UsageLog) -> None:
        self._request_log = request_log
        self._decisions = decisions
        self._usage = usage
        self._ended: list[Ended] = []

    def add(self, context: RequestContext, at: float, used: tuple[int, int]) -> None:
        """A request has ended, and nothing of its context changes any more. ``used``: prompt and completion tokens."""
        placement = context.placement
        decoding = None if placement is None else self._usage.numbers_of(placement.decode)
        self._ended.append(Ended(context, at, used, decoding))
        is_awaited = context.decision is not None and bool(context.decision.on_end)
        if is_awaited or len(self._ended) >= ENDED_AT_ONCE_MAX:
            self.catch_up()

    def catch_up(self) -> None:
        """Account for all requests that have ended."""
        if not self._ended:
            return
        ended, self._ended = self._ended, []
        for one in ended:
            try:
                self._account(one)
            except Exception:
                log.exception("a request that has ended could not be accounted for")

    def _account(self, ended: Ended) -> None:
        finished = self._request_log.finished(ended.context, ended.at)
        self._decisions.finished(ended.context, finished)
        self._usage.ended(ended.context, finished, ended.used, ended.decoding)
