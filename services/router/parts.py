"""What every request of a router works with."""

from __future__ import annotations

from dataclasses import dataclass

from services.router.decisions import Decisions
from services.router.fleet import Fleet
from services.router.ledger import Ledger
from services.router.measures import Measures
from services.router.prompts import Prompts
from services.router.settings import Settings
from services.router.tracing import Tracing
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
    decisions: Decisions
    tracing: Tracing
