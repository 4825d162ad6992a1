"""The state of the console's page, and the difference between two of its versions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from services.collector.console.events import EventLog
from services.collector.console.health import health_of
from services.collector.console.requests import RecentRequests
from services.collector.console.tables import Batches, Models, MonthUsage, model_names, worker_cards
from services.collector.console.traffic import Flows, LastMinute, Tenants
from services.collector.console.views import Health, Page, View, WorkerCard
from services.collector.metrics.fleet_metrics import FleetMetrics
from shared.contracts.inference import RequestFinished

SENT_MAX = 50
"""Requests and events in one update; when more arrive, the oldest are left out."""
REFRESH_S = 1.0
WHOLE_FIELDS = ("flows", "tenants", "models", "usage", "batches", "health", "model_names", "default_mode")
"""Fields of the page that are sent as a whole when they change."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One instant on both clocks, in seconds: ``now`` is monotonic, ``at`` counts since 1970."""

    now: float
    at: float


class ConsoleState:
    """What the console shows beside the metrics. Every part is bounded."""

    def __init__(self, metrics: FleetMetrics, now: float) -> None:
        self.events = EventLog()
        self.recent = RecentRequests()
        self.usage = MonthUsage()
        self.batches = Batches()
        self.month = ""
        """The present month in UTC, such as 2026-11."""
        self.default_mode = ""
        """The mode of requests that do not ask for one; empty: not known."""
        self._metrics = metrics
        self._flows = Flows()
        self._tenants = Tenants()
        self._models = Models()
        self._minute = LastMinute(now)
        self._refreshed_at = now

    def requests_finished(self, requests: Iterable[RequestFinished], moment: Moment) -> None:
        for request in requests:
            self.recent.add(request, moment.at)
            self._flows.add(request, moment.now)
            self._tenants.add(request, moment.now)
            self._models.add(request, moment.now)
            self._minute.add(request, moment.now)

    def fleet_updated(self, moment: Moment) -> None:
        state = self._metrics.fleet.state
        if state is not None:
            self.events.fleet_state(state, moment.at)
        self.tick(moment)

    def tick(self, moment: Moment) -> None:
        """Record expired services and health changes as events, also while no browser watches."""
        if moment.now - self._refreshed_at >= REFRESH_S:
            self._refresh(moment, connected=True)

    def page(self, moment: Moment, *, connected: bool) -> Page:
        cards, health = self._refresh(moment, connected=connected)
        return Page(
            at=round(moment.at, 3),
            default_mode=self.default_mode,
            model_names=model_names(self._metrics, cards),
            health=health,
            workers=cards,
            flows=self._flows.lines(moment.now),
            requests=self.recent.rows(),
            events=self.events.lines(),
            tenants=self._tenants.rows(moment.now),
            models=self._models.rows(cards, moment.now),
            usage=self.usage.table(self.month),
            batches=self.batches.table(),
        )

    def _refresh(self, moment: Moment, *, connected: bool) -> tuple[list[WorkerCard], Health]:
        self._refreshed_at = moment.now
        self._metrics.expire(moment.now)
        self.events.services_heard(set(self._metrics.services), moment.at)
        cards = worker_cards(self._metrics, moment.now)
        self._models.update(cards, moment.now)
        health = health_of(self._metrics, cards, self._minute, moment.now, connected=connected)
        self.events.health_changed(health, moment.at)
        return cards, health


def changes(before: Page, after: Page) -> list[tuple[str, Any]]:
    """What a client that has ``before`` needs to show ``after``: names of server-sent events, and their data."""
    found: list[tuple[str, Any]] = []
    known = {card.id: card for card in before.workers}
    if changed := [card for card in after.workers if known.get(card.id) != card]:
        found.append(("workers", changed))
    if gone := sorted(set(known) - {card.id for card in after.workers}):
        found.append(("gone", gone))
    whole = [(name, getattr(before, name), getattr(after, name)) for name in WHOLE_FIELDS]
    found += [(name, now) for name, was, now in whole if was != now]
    found += [("request", row) for row in _newer(before.requests, after.requests)]
    found += [("event", line) for line in _newer(before.events, after.events)]
    return found


def _newer(before: list[Any], after: list[Any]) -> list[View]:
    """The items that were put in front since ``before``, oldest first."""
    newest = before[0] if before else None
    return list(takewhile(lambda one: one is not newest, after))[:SENT_MAX][::-1]
