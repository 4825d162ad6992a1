"""How many connections clients may hold at a time: all together, and each address for itself."""

from __future__ import annotations

import resource
from collections import Counter
from ipaddress import IPv6Address, ip_address

OTHER_FILES = 512
"""What a router has open beside its clients, at most: its bus, its listeners, what it reads at start."""
HOST_BITS = 64
"""Of an IPv6 address: they are its owner's to choose, so that whoever has one has all of them."""


class Connections:
    """Counts them. 0 as a maximum: as many as come."""

    def __init__(self, *, count_max: int, per_address_max: int) -> None:
        self.count = 0
        """Those that are held now."""
        self._count_max = count_max
        self._per_address_max = per_address_max
        self._by_address: Counter[str] = Counter()

    def enter(self, address: str) -> bool:
        """One more from there; answers whether it may stay. One that may not is not counted and must not ``leave``."""
        owner = owner_of(address)
        full = 0 < self._count_max <= self.count
        if full or 0 < self._per_address_max <= self._by_address[owner]:
            return False
        self.count += 1
        self._by_address[owner] += 1
        return True

    def leave(self, address: str) -> None:
        """One of theirs is gone."""
        owner = owner_of(address)
        self.count -= 1
        self._by_address[owner] -= 1
        if self._by_address[owner] <= 0:
            del self._by_address[owner]


def owner_of(address: str) -> str:
    """Whom an address belongs to, as far as it tells."""
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
    """Let this process have as many files open as its connections need, as far as it may decide that itself."""
    wanted = connections_max + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
