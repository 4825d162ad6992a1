"""What the clients of an HTTP server may hold, as its operator sets it."""

from __future__ import annotations

import msgspec


class EdgeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients of one HTTP server may hold."""

    connections_max: int
    """0: no limit."""
    connections_per_address_max: int
    """From one address, for IPv6 one /64 network. 0: no limit."""
    head_s_max: float
    """From the opening of a connection, or a request's first byte, to the end of the request's head."""
    read_s_max: float
    """Time limit for a client to read what was written."""
    keep_alive_s: float
    """How long an idle connection stays open."""
    drain_s_max: float
    """Time limit for running responses to end when the server stops."""
