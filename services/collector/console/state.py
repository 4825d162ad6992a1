"""What an operator sees: all that the console's page shows, and what of it has changed since it was told last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from services.collector.console.events import Happenings
from services.collector.console.health import health_of
from services.collector.console.requests import RecentRequests
from services.collector.console.traffic import Flows, LastMinute, Tenants
from services.collector.console.views import Health, Page, View, WorkerCard
from services.collector.console.workers import Roster
from services.collector.metrics.fleet_metrics import Ledger
from shared.contracts.inference import RequestFinished

TOLD_MAX = 50
"""Requests and events that are told at a time; of what comes faster, the oldest are left out."""

LOOK_S = 1.0
TOLD_WHOLE = ("flows", "tenants", "health", "model_names", "mode")


@dataclass(frozen=True, slots=True)
class Moment:
    """On both clocks, in seconds: ``now`` only to be compared, ``at`` since 1970."""

    now: float
    at: float


class Console:
    """What the ledger does not keep. All of it bounded."""

    def __init__(self, ledger: Ledger, now: float) -> None:
        self.happened = Happenings()
        self.recent = RecentRequests()
        self.mode = ""
        """Of requests that ask for none, as routers follow it; empty: not known."""
        self._ledger = ledger
        self._roster = Roster()
        self._flows = Flows()
        self._tenants = Tenants()
        self._minute = LastMinute(now)
        self._looked_at = now

    def requests_finished(self, requests: Iterable[RequestFinished], moment: Moment) -> None:
        """Routers tell of requests that ended."""
        for told in requests:
            self.recent.add(told, moment.at)
            self._flows.add(told, moment.now)
            self._tenants.add(told, moment.now)
            self._minute.add(told, moment.now)

    def fleet_told(self, moment: Moment) -> None:
        """The ledger has a newer state of the fleet."""
        state = self._ledger.fleet.state
        if state is not None:
            self._roster.told(state)
            self.happened.fleet_told(state, moment.at)
        self.passed(moment)

    def passed(self, moment: Moment) -> None:
        """Time went by: what nobody speaks of any more, and how all is, is noticed although nobody looks."""
        if moment.now - self._looked_at >= LOOK_S:
            self._look(moment, connected=True)

    def page(self, moment: Moment, *, connected: bool) -> Page:
        """All that there is to see at this moment."""
        cards, health = self._look(moment, connected=connected)
        return Page(
            at=round(moment.at, 3),
            mode=self.mode,
            model_names=self._roster.model_names(cards),
            health=health,
            workers=cards,
            flows=self._flows.lines(moment.now),
            requests=self.recent.rows(),
            events=self.happened.lines(),
            tenants=self._tenants.rows(moment.now),
        )

    def _look(self, moment: Moment, *, connected: bool) -> tuple[list[WorkerCard], Health]:
        """Who is there and how all is; what changes without anybody saying so is noticed here."""
        self._looked_at = moment.now
        self._ledger.expire(moment.now)
        self.happened.services_heard(set(self._ledger.services), moment.at)
        cards = self._roster.cards(self._ledger, moment.now)
        health = health_of(self._ledger, cards, self._minute, moment.now, connected=connected)
        self.happened.health_changed(health, moment.at)
        return cards, health


def changes(before: Page, after: Page) -> list[tuple[str, Any]]:
    """What somebody who has the one must hear to have the other: names of events, and their data."""
    told: list[tuple[str, Any]] = []
    known = {card.id: card for card in before.workers}
    if moved := [card for card in after.workers if known.get(card.id) != card]:
        told.append(("workers", moved))
    if gone := sorted(set(known) - {card.id for card in after.workers}):
        told.append(("gone", gone))
    whole = [(name, getattr(before, name), getattr(after, name)) for name in TOLD_WHOLE]
    told += [(name, now) for name, was, now in whole if was != now]
    told += [("request", row) for row in _newer(before.requests, after.requests)]
    told += [("event", line) for line in _newer(before.events, after.events)]
    return told


def _newer(before: list[Any], after: list[Any]) -> list[View]:
    """What was put in front since then, the oldest first."""
    newest = before[0] if before else None
    return list(takewhile(lambda one: one is not newest, after))[:TOLD_MAX][::-1]
