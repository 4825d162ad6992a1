"""What every request of a router works with."""

from __future__ import annotations

from dataclasses import dataclass

from services.router.core.failure_policy import FailurePolicy
from services.router.core.terms import Terms
from services.router.decisions import Decisions
from services.router.fleet import Fleet
from services.router.ledger import Ledger
from services.router.measures import Measures
from services.router.presence import Presence
from services.router.prompts import Prompts
from services.router.reservations import ReservationFeed
from services.router.settings import Settings
from services.router.tracing import Tracing
from services.router.usual_mode import UsualModeFeed
from services.router.waiting_room import WaitingRoom
from shared.bus.port import Bus
from shared.bus.streams import LegInbox
from shared.contracts.ids import RouterId
from shared.runtime.clock import Clock


@dataclass(frozen=True, kw_only=True)
class Parts:
    """One of each; made in ``service``."""

    router_id: RouterId
    settings: Settings
    clock: Clock
    bus: Bus
    fleet: Fleet
    measures: Measures
    inbox: LegInbox
    prompts: Prompts
    ledger: Ledger
    terms: Terms
    room: WaitingRoom
    decisions: Decisions
    tracing: Tracing
    reservations: ReservationFeed
    presence: Presence
    failures: FailurePolicy
    usual: UsualModeFeed
