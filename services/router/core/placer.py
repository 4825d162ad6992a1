"""What a placement policy is, so that one can be held against another on the same fleet."""

from __future__ import annotations

from typing import Protocol

from services.router.core.placement import Need, Placed, Refused


class Placer(Protocol):
    """Chooses workers for requests. It may remember what it chose; the fleet's view is given to it when it is made."""

    def place(self, need: Need, now: float) -> Placed | Refused:
        """Which workers serve it, with what is known at ``now`` (seconds, monotonic)."""
