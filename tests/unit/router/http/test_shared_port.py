"""Several routers behind one port, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from services.router.service import Router
from services.router.settings import Settings
from services.router.telemetry.tracing import Tracing
from shared.http.server import PortTaken, Server, listen, make_server, share
from shared.runtime.clock import SystemClock
from tests.support.memory_bus import MemoryBus, MemoryHub

HOST = "127.0.0.1"
CONNECTIONS_MAX = 200
"""Enough connections that the kernel gives some to each of two routers."""


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, str]]:
    """Start a router on a port of its own; returns its server and URL."""
    settings = Settings(log_requests=False)
    router = Router(settings, MemoryBus(MemoryHub()), SystemClock(), Tracing())
    server = make_server(router.edge)
    listener = listen(HOST, 0)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    await server.listening.wait()
    try:
        yield server, f"http://{HOST}:{listener.getsockname()[1]}"
    finally:
        server.stop()
        await running
        await router.close()


def shared_port() -> tuple[socket.socket, int]:
    first = share(HOST, 0)
    return first, first.getsockname()[1]


async def healthy(port: int) -> bool:
    """Send a request over a new connection."""
    async with httpx.AsyncClient(trust_env=False) as client:
        try:
            return (await client.get(f"http://{HOST}:{port}/health")).status_code == 200
        except httpx.ConnectError:
            return False


async def test_a_router_serves_its_own_port_and_the_shared_port():
    bound, port = shared_port()
    async with serving() as (server, own), httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"{own}/health")).status_code == 200
        assert not await healthy(port)

        await server.listen_too(bound)

        assert await healthy(port)
        assert (await client.get(f"{own}/health")).status_code == 200


async def test_the_kernel_spreads_connections_over_the_running_routers():
    bound, port = shared_port()
    async with serving() as (stays, _):
        async with serving() as (ends, _):
            await stays.listen_too(bound)
            await ends.listen_too(share(HOST, port))
            for _ in range(CONNECTIONS_MAX):
                assert await healthy(port)
                if stays.server_state.total_requests and ends.server_state.total_requests:
                    break
            else:
                pytest.fail("one router got all connections")

        for _ in range(20):
            assert await healthy(port)
    assert not await healthy(port)


def test_a_port_bound_exclusively_cannot_be_shared():
    alone = listen(HOST, 0)
    with alone, pytest.raises(PortTaken, match="ROUTER_SHARED_PORT"):
        share(HOST, alone.getsockname()[1])


def test_a_shared_port_cannot_be_bound_exclusively():
    bound, port = shared_port()
    bound.listen()
    with bound, pytest.raises(PortTaken, match="ROUTER_PORT"):
        listen(HOST, port)
