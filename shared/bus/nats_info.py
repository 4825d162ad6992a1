"""What a nats-server says of itself to anybody who connects, before it asks who that is."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import msgspec

from shared.bus.port import BusDown

PORT = 4222
LINE_BYTES_MAX = 256 * 1024
GREETING = b"INFO "


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Part of NATS's INFO."""

    version: str = ""
    max_payload: int = 0
    jetstream: bool = False
    auth_required: bool = False
    tls_required: bool = False
    connect_urls: list[str] = msgspec.field(default_factory=list)
    """Where the servers of its cluster are."""


async def read_info(url: str, within_s: float) -> ServerInfo:
    """Connect, listen, leave. Raises BusDown."""
    try:
        address = urlsplit(url if "://" in url else f"nats://{url}")
        host, port = address.hostname or "127.0.0.1", address.port or PORT
    except ValueError as error:
        raise BusDown(f"{url} is no address of a NATS: {error}") from error
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(host, port, limit=LINE_BYTES_MAX)
            try:
                line = await reader.readline()
            finally:
                writer.close()
    except ConnectionRefusedError as error:
        raise BusDown(f"nobody listens at {host}:{port}") from error
    except (TimeoutError, OSError, ValueError) as error:
        why = getattr(error, "strerror", "") or str(error) or f"not within {within_s:g} s"
        raise BusDown(f"nothing answers at {host}:{port}: {why}") from error
    if not line.startswith(GREETING):
        raise BusDown(f"what answers at {host}:{port} is no nats-server")
    try:
        return msgspec.json.decode(line.removeprefix(GREETING), type=ServerInfo)
    except msgspec.MsgspecError as error:
        raise BusDown(f"what answers at {host}:{port} is no nats-server: {error}") from error
