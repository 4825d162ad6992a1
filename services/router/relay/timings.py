"""The time marks and durations of one request."""

from __future__ import annotations

import msgspec

NOT_BROKEN = -1.0


class Timings(msgspec.Struct, kw_only=True):
    """Durations in seconds, instants on the router's monotonic clock. An instant of 0 has not been reached.

    ``admission_s``, ``tokenize_s``, ``place_s`` and ``failed_s`` follow one another without overlap, before the legs of
    the last attempt: together they are the router's own share of the time to the first token.
    """

    started_at: float = 0.0
    admission_s: float = 0.0
    """In the admission queue, and waiting for NATS to come back."""
    tokenize_s: float = 0.0
    place_s: float = 0.0
    """All placements together."""
    failed_s: float = 0.0
    """Failed attempts, each from its placement to the next one, without ``place_s``."""
    prefill_s: float = -1.0
    """The last attempt's prefill leg, from its start to its report; -1: there is none."""
    first_at: float = 0.0
    """First data of the response."""
    last_at: float = 0.0
    """Latest data of the response."""
    gap_s_max: float = 0.0
    """The longest time between two pieces of the stream."""
    answered_at: float = 0.0
    """When the response was complete, if the router waited for a report after that."""
    broke_at: float = NOT_BROKEN
    """While a stream is interrupted: when the client got its latest data."""
