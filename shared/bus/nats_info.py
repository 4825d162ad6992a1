"""The INFO line, which a nats-server sends to every client before it authenticates it."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import msgspec

from shared.bus.port import BusDown

PORT = 4222
LINE_BYTES_MAX = 256 * 1024
GREETING = b"INFO "


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of INFO that Baton reads."""

    version: str = ""
    max_payload: int = 0
    jetstream: bool = False
    auth_required: bool = False
    tls_required: bool = False
    connect_urls: list[str] = msgspec.field(default_factory=list)
    """Addresses of the servers of its cluster."""


async def read_info(url: str, within_s: float) -> ServerInfo:
    """Connect, read INFO and disconnect. Raises BusDown."""
    try:
        address = urlsplit(url if "://" in url else f"nats://{url}")
        host, port = address.hostname or "127.0.0.1", address.port or PORT
    except ValueError as error:
        raise BusDown(f"{url} is not a NATS address: {error}") from error
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(host, port, limit=LINE_BYTES_MAX)
            try:
                line = await reader.readline()
            finally:
                writer.close()
    except ConnectionRefusedError as error:
        raise BusDown(f"nothing listens at {host}:{port}") from error
    except (TimeoutError, OSError, ValueError) as error:
        why = getattr(error, "strerror", "") or str(error) or f"not within {within_s:g} s"
        raise BusDown(f"nothing answers at {host}:{port}: {why}") from error
    if not line.startswith(GREETING):
        raise BusDown(f"the server at {host}:{port} is not a nats-server")
    try:
        return msgspec.json.decode(line.removeprefix(GREETING), type=ServerInfo)
    except msgspec.MsgspecError as error:
        raise BusDown(f"the server at {host}:{port} is not a nats-server: {error}") from error
