"""The serving mode of requests that name none: a key-value entry that operators set and routers watch."""

from __future__ import annotations

from shared.contracts.message import Message

FLEET = "fleet"
"""The only scope: all routers."""
DEFAULT_MODES = ("auto", "aggregated", "disaggregated")
"""Values of ``DefaultMode.mode``; auto lets placement choose."""


class DefaultMode(Message, frozen=True, kw_only=True):
    """Operator -> routers: the mode of requests that ask for none."""

    scope: str = FLEET
    mode: str = "auto"
