"""How requests are served that do not say so themselves: one kept value, which operators set and routers follow."""

from __future__ import annotations

from shared.contracts.message import Message

FLEET = "fleet"
"""The only scope that there is: all routers."""
DEFAULT_MODES = ("auto", "aggregated", "disaggregated")
"""What may be usual; auto leaves it to placement."""


class DefaultMode(Message, frozen=True, kw_only=True):
    """Operator -> routers: the mode of requests that ask for none."""

    scope: str = FLEET
    mode: str = "auto"
