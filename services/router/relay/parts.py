"""What every request of a router works with."""

from __future__ import annotations

from dataclasses import dataclass

from services.router.admission.admission_queue import AdmissionQueue
from services.router.placement.decision_service import DecisionService
from services.router.placement.policy import RequestPolicy
from services.router.relay.failure_policy import FailurePolicy
from services.router.settings import Settings
from services.router.state.bus_health import BusHealth
from services.router.state.default_mode import DefaultModeFeed
from services.router.state.fleet import Fleet
from services.router.state.reservation_feed import ReservationFeed
from services.router.state.speed_feed import Measures
from services.router.telemetry.request_log import Ledger
from services.router.telemetry.tracing import Tracing
from services.router.tokenize.prompts import Prompts
from shared.bus.leg_inbox import LegInbox
from shared.bus.port import Bus
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
    terms: RequestPolicy
    room: AdmissionQueue
    decisions: DecisionService
    tracing: Tracing
    reservations: ReservationFeed
    bus_health: BusHealth
    failures: FailurePolicy
    usual: DefaultModeFeed
