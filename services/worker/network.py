"""Where a worker and its engine can be reached: on loopback only, if no worker of its system is on another host."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

import psutil

from shared.addresses import servers_of
from shared.contracts.workers import ADDRESSES_MAX
from shared.loopback import is_loopback

NATS_PORT = 4222
RESOLVE_S_MAX = 10.0
UCX_DEVICES, UCX_TRANSPORTS = "UCX_NET_DEVICES", "UCX_TLS"
LOOPBACK_DEVICE = "lo"


async def own_address(nats_url: str) -> str:
    """The address from which this host reaches NATS; of several servers' ones, the first that is not loopback. Sends
    nothing. Raises OSError, ValueError, TimeoutError.
    """
    found = [await _address_towards(server) for server in servers_of(nats_url)]
    return next((each for each in found if not is_loopback(each)), found[0])


async def _address_towards(server: str) -> str:
    where, loop = urlsplit(server), asyncio.get_running_loop()
    async with asyncio.timeout(RESOLVE_S_MAX):
        ways = await loop.getaddrinfo(where.hostname, where.port or NATS_PORT, type=socket.SOCK_DGRAM)
    failure: OSError | None = None
    for family, kind, _, _, address in ways:
        with socket.socket(family, kind) as sock:
            try:
                sock.connect(address)  # A datagram socket only looks up the route.
            except OSError as error:
                failure = error
            else:
                return str(sock.getsockname()[0])
    raise failure or OSError(f"{where.hostname} has no address")


def ucx_defaults(kv_host: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What confines UCX to loopback, if that is where other workers reach this one. Its TCP transport listens on all
    network cards otherwise, and writes where a packet says, without asking who sent it. Shared memory and ``cuda_ipc``
    are no network devices, and stay.

    A device that the operator has chosen stays, and so do transports without TCP: RDMA has no device on loopback.
    """
    if not is_loopback(kv_host) or UCX_DEVICES in environ or not uses_tcp(environ.get(UCX_TRANSPORTS, "")):
        return {}
    return {UCX_DEVICES: LOOPBACK_DEVICE}


def uses_tcp(transports: str) -> bool:
    """Whether these transports, as UCX_TLS has them, include TCP: ``tcp,self`` names those in use, ``^tcp`` the others.
    Without any, UCX uses all.
    """
    names = transports.strip().removeprefix("^").split(",")
    if transports.strip().startswith("^"):
        return "tcp" not in names
    return names == [""] or not {"tcp", "all"}.isdisjoint(names)


async def network_addresses() -> list[str] | None:
    """Addresses other than loopback on which this process and its children accept TCP connections, at most
    ADDRESSES_MAX; None if the system does not tell.
    """
    return await asyncio.to_thread(_network_addresses)


def _network_addresses() -> list[str] | None:
    here = psutil.Process()
    found: set[str] = set()
    try:
        for process in (here, *here.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                listening = [one for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
                found.update(one.laddr.ip for one in listening)
    except (psutil.Error, OSError):
        return None
    return sorted(address for address in found if not is_loopback(address))[:ADDRESSES_MAX]
