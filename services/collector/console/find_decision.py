"""Why one request went where it went: asked of the router that placed it, and put into words."""

from __future__ import annotations

import re
from typing import Any

from services.collector.console.decision import detail_of
from services.collector.console.orders import Refusal
from services.collector.console.requests import RecentRequests
from shared.bus.port import AskRefused, AskTimedOut, Bus, BusError, NoResponders
from shared.contracts.channels import DECISION
from shared.contracts.decisions import AskDecision
from shared.contracts.ids import DecisionId, RouterId

DECISION_ID = re.compile(r"([A-Za-z0-9_-]{1,128})-d[0-9]{1,18}")
"""It begins with the id of its router."""
ASK_S_MAX = 3.0


async def find_decision(bus: Bus, recent: RecentRequests, decision_id: str) -> dict[str, Any] | Refusal:
    """The request and its decision, or why there are none."""
    named = DECISION_ID.fullmatch(decision_id)
    if named is None:
        return Refusal(status=404, message="That is no decision's id: those are in the header x-baton-decision.")
    ask = AskDecision(router_id=RouterId(named[1]), decision_id=DecisionId(decision_id))
    try:
        decision = (await bus.ask(DECISION, ask, timeout_s=ASK_S_MAX)).decision
    except (NoResponders, AskTimedOut, AskRefused):
        why = f"Router {named[1]}, which made that decision, does not answer: it has ended, perhaps."
        return Refusal(status=404, message=why)
    except BusError:
        return Refusal(status=503, message="NATS cannot be reached just now. Try again shortly.")
    if decision is None:
        forgotten = "has forgotten it: it keeps the newest only (ROUTER_DECISIONS_MAX)"
        return Refusal(status=404, message=f"Router {named[1]} {forgotten}.")
    return detail_of(recent.find(decision_id), decision)
