"""Sockets for addresses of both families."""

from __future__ import annotations

import socket


def family_of(host: str) -> socket.AddressFamily:
    """The family of sockets that are bound to this address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
