"""Limits on what clients may hold: connections, in all and for each address; time without reading or asking; and bodies
that are to be small.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import resource
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address
from typing import Final, Protocol

from starlette.requests import ClientDisconnect, Request

log = logging.getLogger("baton.http")

BACKLOG: Final = 4096
"""Connections that the kernel holds until they are accepted; up to this many are accepted in one turn of the loop."""
OTHER_FILES: Final = 512 + BACKLOG
"""Files that a process has open besides its clients' connections: NATS, listeners, files read at start, and connections
that are refused or make room, until the loop closes them.
"""
LOOKED_AT_MAX: Final = 64
"""Connections that are looked at to find one that makes room."""
UNNAMED: Final = "-"
"""The address of connections without one, as over a Unix socket."""
FILES_KEPT_MAX: Final = 512
FILES_KEPT_SHARE: Final = 20
"""One of so many descriptors, but at most ``FILES_KEPT_MAX``, stay free of clients' connections: for NATS, files and
connections that make room.
"""
NO_LIMIT: Final = 1 << 62
QUIET_S: Final = 60.0
"""After so long without another connection, a lack of descriptors is over."""
HOST_BITS: Final = 64
"""The low bits of an IPv6 address: a network's owner chooses them freely, so a limit per address must ignore them."""


class Client(Protocol):
    """What the limits use of a connection."""

    @property
    def busy(self) -> bool:
        """Whether a request is being served or waits to be."""

    @property
    def waits_for_client(self) -> bool:
        """Whether nothing is served: the client must send or read first."""

    def unsent_bytes(self) -> int:
        """Bytes in the socket's write buffer."""

    def head_is_late(self) -> None:
        """No request came in time: close the connection."""

    def reader_is_late(self) -> None:
        """The client did not read in time: drop the connection with its unsent bytes."""

    def rest_is_over(self) -> None:
        """The client has asked nothing for as long as an idle connection stays open: close it."""

    def make_room(self) -> None:
        """Another client needs the place: drop the connection."""


class Descriptors:
    """Notices when almost no file descriptors are left. The system gives a new connection the lowest free one, so its
    number tells. Beyond the limit, libuv closes connections without a word, and nothing else can be opened.
    """

    def __init__(self, files_max: int, now: Callable[[], float]) -> None:
        """``files_max``: the process's limit; below 0: none."""
        self.lacking = 0
        """Connections that came while almost none were left."""
        self._files_max = files_max
        self._last = files_max - min(FILES_KEPT_MAX, files_max // FILES_KEPT_SHARE + 1) if files_max >= 0 else -1
        self._places = NO_LIMIT
        """Connections for which there are descriptors, once they have run out: later ones get the numbers of those
        that made room, which do not tell any more."""
        self._now = now
        self._lacking_at = -QUIET_S

    def lack(self, descriptor: int, connections: int) -> bool:
        """Whether a connection with this descriptor should not have it, beside so many others. Logged once until that
        is over.
        """
        now = self._now()
        is_over = now - self._lacking_at >= QUIET_S
        if is_over:
            self._places = NO_LIMIT
        if 0 <= self._last <= descriptor:
            self._places = min(self._places, connections)
        if connections < self._places:
            return False
        self.lacking += 1
        if is_over:
            log.warning(
                "almost all of this process's %d file descriptors are in use: new connections take the place of idle "
                "ones, or are refused. Raise the limit (ulimit -n, LimitNOFILE).",
                self._files_max,
            )
        self._lacking_at = now
        return True


class Connections:
    """The open connections by their owner: an IPv4 address, or an IPv6 network. A maximum of 0 means no limit.

    When all places are taken, one that waits for its client makes room: of the newcomer's own owner, when that has
    reached its maximum, otherwise of an owner that has no fewer than the newcomer's. So the owners that want places
    share them equally before any key is seen, and no owner keeps others out by sending nothing. Connections that
    have brought a valid key make room last, and only for owners that have fewer.
    """

    def __init__(self, count_max: int, per_address_max: int) -> None:
        self._count_max = count_max
        self._per_address_max = per_address_max
        self._clients: list[Client] = []
        self._places: dict[Client, int] = {}
        """Where each is in the list."""
        self._owners: dict[Client, str] = {}
        self._by_owner: dict[str, dict[Client, None]] = {}
        self._known: set[object] = set()

    @property
    def count(self) -> int:
        return len(self._clients)

    def enter(self, client: Client, address: str, *, is_full: bool = False) -> bool:
        """Count one more connection. False: refuse it, it is not counted. ``is_full``: there is no place for another,
        however many are open.
        """
        owner = owner_of(address)
        own = self._by_owner.get(owner, {})
        victim: Client | None = None
        if 0 < self._per_address_max <= len(own):
            victim = self._own_victim(own)
        elif is_full or 0 < self._count_max <= len(self._clients):
            victim = self._victim(len(own))
        else:
            self._add(client, owner)
            return True
        if victim is None:
            return False
        self.leave(victim)
        victim.make_room()
        self._add(client, owner)
        return True

    def know(self, client: object) -> None:
        """The connection has brought a valid key."""
        self._known.add(client)

    def leave(self, client: Client) -> None:
        """The connection has closed, or is being closed. Those that are not counted are ignored."""
        place = self._places.pop(client, None)
        if place is None:
            return
        last = self._clients.pop()
        if last is not client:
            self._clients[place] = last
            self._places[last] = place
        owner = self._owners.pop(client)
        del self._by_owner[owner][client]
        if not self._by_owner[owner]:
            del self._by_owner[owner]
        self._known.discard(client)

    def _add(self, client: Client, owner: str) -> None:
        self._places[client] = len(self._clients)
        self._clients.append(client)
        self._owners[client] = owner
        self._by_owner.setdefault(owner, {})[client] = None

    def _own_victim(self, own: dict[Client, None]) -> Client | None:
        """The oldest that makes room for another one of its owner. Those that do not are looked at later again."""
        for client in list(itertools.islice(own, LOOKED_AT_MAX)):
            if client not in self._known and client.waits_for_client:
                return client
            own[client] = own.pop(client)
        return None

    def _victim(self, newcomers: int) -> Client | None:
        """One that makes room for a connection whose owner has ``newcomers`` already, of a random sample: a walk over
        all would let a flood of newcomers stop the event loop.
        """
        found, found_rank = None, (False, 0)
        for client in random.sample(self._clients, min(LOOKED_AT_MAX, len(self._clients))):
            known, share = client in self._known, len(self._by_owner[self._owners[client]])
            rank, enough = (not known, share), share > newcomers + 1 if known else share >= newcomers
            if enough and rank > found_rank and client.waits_for_client:
                found, found_rank = client, rank
        return found


class IdleClients:
    """Clients that the server waits for, the longest wait first.

    The dicts are ordered by time, because waits only begin now: a walk stops at the first client that is in time.
    """

    def __init__(self, now: Callable[[], float], *, head_s_max: float, read_s_max: float, keep_alive_s: float) -> None:
        self._now = now
        self._keep_alive_s = keep_alive_s
        self._resting: dict[Client, float] = {}
        """Clients that have all their responses, with the time since when."""
        self._head_s_max = head_s_max
        self._read_s_max = read_s_max
        self._asking: dict[Client, float] = {}
        """Since when the server waits for the head of the next request, with no response outstanding."""
        self._reading: dict[Client, float] = {}
        """Since when the server waits for the client to read, with the response complete or blocked."""

    def rests(self, client: Client) -> None:
        """The client has its responses, and ``keep_alive_s`` from now to send the next request."""
        self._resting[client] = self._now()

    def asks(self, client: Client) -> None:
        if self._resting:
            self._resting.pop(client, None)

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
        self._reading.pop(client, None)

    def left(self, client: Client) -> None:
        self._resting.pop(client, None)
        self._asking.pop(client, None)
        self._reading.pop(client, None)

    def end_late(self) -> None:
        """End the clients whose time is over."""
        now = self._now()
        for client in _older(self._resting, now - self._keep_alive_s):
            del self._resting[client]
            client.rest_is_over()
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


BODY_BYTES_MAX: Final = 16 * 1024
"""Body size of an endpoint that takes small bodies only, such as an operator's order."""
BODY_S_MAX: Final = 10.0


class BodyRefused(Exception):
    """The body is too large or too slow; the message is for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def small_body(request: Request, bytes_max: int = BODY_BYTES_MAX) -> bytes:
    """The whole body, up to ``bytes_max`` and within ``BODY_S_MAX``. Raises BodyRefused."""
    body = b""
    try:
        async with asyncio.timeout(BODY_S_MAX):
            async for piece in request.stream():
                body += piece
                if len(body) > bytes_max:
                    raise BodyRefused(413, f"An order has at most {bytes_max} bytes.")
    except (TimeoutError, ClientDisconnect):  # The client has left: it cannot read the refusal.
        raise BodyRefused(408, "The order did not arrive in time.") from None
    return body
