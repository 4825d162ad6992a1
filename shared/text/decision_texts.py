"""Why a placement decision cannot be shown; for the console and the command line."""

from __future__ import annotations

from shared.contracts.ids import RouterId

NO_DECISION_ID = "That is not a decision id: each response has one in its header x-baton-decision."


def router_away(router_id: RouterId) -> str:
    """The router that made it does not respond."""
    return f"Router {router_id}, which made that decision, does not respond. It may have stopped."


def not_kept(router_id: RouterId) -> str:
    """The router does not store it any more."""
    return f"Router {router_id} no longer has that decision: it keeps the newest only (ROUTER_DECISIONS_MAX)."
