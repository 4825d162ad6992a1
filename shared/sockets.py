"""Sockets for addresses of both families."""

from __future__ import annotations

import random
import socket

PORTS = range(20_000, 32_000)
"""Ports below those that Linux picks by itself."""
PORT_ATTEMPTS_MAX = 32


def family_of(host: str) -> socket.AddressFamily:
    """The family of sockets that are bound to this address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def free_port(host: str) -> int:
    """A TCP port that is free now and probably still when an engine binds it, many seconds later: the system never
    picks ports of this range by itself. Raises OSError when ``host`` is no address of this machine.
    """
    refused: OSError | None = None
    for port in random.sample(PORTS, PORT_ATTEMPTS_MAX):
        with socket.socket(family_of(host)) as sock:
            try:
                sock.bind((host, port))
            except OSError as error:
                refused = error
            else:
                return port
    raise OSError(f"no port can be bound on {host}: set WORKER_KV_HOST to an address of this machine") from refused
