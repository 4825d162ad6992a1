"""The time marks of one request, in seconds of the router's monotonic clock."""

from __future__ import annotations

from typing import Final

from msgspec.structs import astuple

from shared.contracts.decisions import TtftParts

NOT_BROKEN: Final = -1.0


class Timings:
    """Durations in seconds, instants on the router's monotonic clock. An instant of 0 has not been reached.

    ``admission_s``, ``tokenize_s``, ``place_s`` and ``failed_s`` follow one another without overlap, before the legs of
    the last attempt: together they are the router's own share of the time to the first token.
    """

    prefill_s = -1.0
    """The last attempt's prefill leg, from its start to its report; -1: there is none."""
    first_at = 0.0
    """First data of the response."""
    last_at = 0.0
    """Latest data of the response."""
    gap_s_max = 0.0
    """The longest time between two pieces of the stream."""
    answered_at = 0.0
    """When the response was complete, if the router waited for a report after that."""

    def __init__(
        self,
        *,
        started_at: float = 0.0,
        admission_s: float = 0.0,
        tokenize_s: float = 0.0,
        place_s: float = 0.0,
        failed_s: float = 0.0,
    ) -> None:
        self.started_at = started_at
        self.admission_s = admission_s
        """Time in the admission queue, and waiting for NATS to come back."""
        self.tokenize_s = tokenize_s
        self.place_s = place_s
        """Time of all placements together."""
        self.failed_s = failed_s
        """Time of failed attempts, each from its placement to the next one, without ``place_s``."""
        self.broke_at = NOT_BROKEN
        """When the client got its latest data of a stream that is interrupted; else ``NOT_BROKEN``."""


def total_s(parts: TtftParts) -> float:
    """What ``parts.total_s()`` returns; that method is not compiled."""
    total: float = sum(astuple(parts))
    return total
