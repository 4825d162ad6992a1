"""Limits on what clients may hold: connections, in all and for each address, and time without reading or asking."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address
from typing import Protocol

import msgspec

OTHER_FILES = 512
"""Files that a process has open besides its clients' connections: NATS, listeners, files read at start."""
HOST_BITS = 64
"""The low bits of an IPv6 address: a network's owner chooses them freely, so a limit per address must ignore them."""


class EdgeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients of one HTTP server may hold."""

    connections_max: int
    """0: no limit."""
    connections_per_address_max: int
    """From one address, for IPv6 one /64 network. 0: no limit."""
    head_s_max: float
    """From the opening of a connection, or a request's first byte, to the end of the request's head."""
    read_s_max: float
    """For a client to read what was written."""
    keep_alive_s: float
    """How long an idle connection stays open."""
    drain_s_max: float
    """For running responses to end when the server stops."""


class Connections:
    """Counts connections. A maximum of 0 means no limit."""

    def __init__(self, count_max: int, per_address_max: int) -> None:
        self.count = 0
        """Open connections."""
        self._count_max = count_max
        self._per_address_max = per_address_max
        self._by_address: Counter[str] = Counter()

    def enter(self, address: str) -> bool:
        """Count one more connection from there. False: refuse it; it is not counted and must not ``leave``."""
        owner = owner_of(address)
        full = 0 < self._count_max <= self.count
        if full or 0 < self._per_address_max <= self._by_address[owner]:
            return False
        self.count += 1
        self._by_address[owner] += 1
        return True

    def leave(self, address: str) -> None:
        """A counted connection has closed."""
        owner = owner_of(address)
        self.count -= 1
        self._by_address[owner] -= 1
        if self._by_address[owner] <= 0:
            del self._by_address[owner]


class Client(Protocol):
    """What ``IdleClients`` uses of a connection."""

    @property
    def busy(self) -> bool:
        """Whether a request is being served or waits to be."""

    def unsent_bytes(self) -> int:
        """Bytes in the socket's write buffer."""

    def head_is_late(self) -> None:
        """No request came in time: close the connection."""

    def reader_is_late(self) -> None:
        """The client did not read in time: drop the connection with its unsent bytes."""


class IdleClients:
    """Clients that the server waits for, the longest wait first.

    Both dicts are ordered by time, because waits only begin now: a walk stops at the first client that is in time.
    """

    def __init__(self, now: Callable[[], float], *, head_s_max: float, read_s_max: float) -> None:
        self._now = now
        self._head_s_max = head_s_max
        self._read_s_max = read_s_max
        self._asking: dict[Client, float] = {}
        """Since when the server waits for the head of the next request, with no response outstanding."""
        self._reading: dict[Client, float] = {}
        """Since when the server waits for the client to read, with the response complete or blocked."""

    def waits_for_head(self, client: Client) -> None:
        """The client has ``head_s_max`` from now to send a complete head."""
        self._asking.setdefault(client, self._now())

    def head_came(self, client: Client) -> None:
        """The head is complete."""
        if self._asking:
            self._asking.pop(client, None)

    def waits_for_reader(self, client: Client) -> None:
        """The client has ``read_s_max`` from now to read what was written."""
        self._reading.setdefault(client, self._now())

    def has_read(self, client: Client) -> None:
        """The client has caught up."""
        self._reading.pop(client, None)

    def left(self, client: Client) -> None:
        """The connection has closed."""
        self._asking.pop(client, None)
        self._reading.pop(client, None)

    def end_late(self) -> None:
        """End the clients whose time is over."""
        now = self._now()
        for client in _older(self._asking, now - self._head_s_max):
            del self._asking[client]
            if client.busy:  # It pipelines its next request slowly while it is served: its time begins after that.
                self._asking[client] = now
            else:
                client.head_is_late()
        for client in [client for client in self._reading if not client.unsent_bytes()]:
            del self._reading[client]
        for client in _older(self._reading, now - self._read_s_max):
            del self._reading[client]
            client.reader_is_late()


def owner_of(address: str) -> str:
    """The address for IPv4, the /64 network for IPv6."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(IPv6Address(int(parsed) >> HOST_BITS << HOST_BITS))
    return address


def allow_open_files(connections_max: int) -> None:
    """Raise the soft limit of open files to what the connections need, as far as the hard limit allows."""
    wanted = connections_max + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _older(since: dict[Client, float], than: float) -> list[Client]:
    """The clients that have waited since before ``than``."""
    found: list[Client] = []
    for client, at in since.items():
        if at >= than:
            break
        found.append(client)
    return found
