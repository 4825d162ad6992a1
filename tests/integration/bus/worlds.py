"""Where the conformance suite runs: the same world on the memory bus and on a real nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

import nats

from shared.bus.nats_bus import connect_nats
from shared.bus.port import Bus
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.nats_server import NatsServer

SOON_S = 20.0
"""What should happen at once, does within this, on a machine that stands still at times."""
FRAME_BUDGET_BYTES = 24 * 1024 * 1024


class World(Protocol):
    """Several processes on one bus."""

    async def bus(self) -> Bus: ...

    async def raw(self, subject: str, payload: bytes) -> None:
        """Bytes from somebody who does not keep the contract."""

    def outage(self, *, storage_lost: bool = False) -> AbstractAsyncContextManager[None]: ...


class MemoryWorld:
    def __init__(self) -> None:
        self.hub = MemoryHub()
        self.buses: list[MemoryBus] = []

    async def bus(self) -> MemoryBus:
        bus = MemoryBus(self.hub, frame_budget_bytes=FRAME_BUDGET_BYTES)
        self.buses.append(bus)
        return bus

    async def raw(self, subject: str, payload: bytes) -> None:
        self.hub.deliver(subject, payload, {})

    @asynccontextmanager
    async def outage(self, *, storage_lost: bool = False) -> AsyncIterator[None]:
        for bus in self.buses:
            bus.lose()
        if storage_lost:
            for bucket in self.hub.buckets.values():
                bucket.values.clear()
        yield
        for bus in self.buses:
            bus.restore()

    async def close(self) -> None:
        for bus in self.buses:
            await bus.close()


class NatsWorld:
    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.buses: list[Bus] = []
        self._lost: list[Bus] = []  # those that have told of the present outage

    async def bus(self) -> Bus:
        bus = await connect_nats(self.server.url, name="test", frame_budget_bytes=FRAME_BUDGET_BYTES)
        self.buses.append(bus)
        bus.on_disconnect(lambda: self._lost.append(bus))
        return bus

    async def raw(self, subject: str, payload: bytes) -> None:
        stranger = await nats.connect(self.server.url)
        await stranger.publish(subject, payload)
        await stranger.close()

    @asynccontextmanager
    async def outage(self, *, storage_lost: bool = False) -> AsyncIterator[None]:
        self._lost.clear()
        self.server.kill()
        if storage_lost:
            self.server.lose_storage()
        # A bus is disconnected some turns of the loop before it says so.
        await until(lambda: len(self._lost) == len(self.buses))
        yield
        self.server.start()
        reconnects = [bus.counts.reconnects for bus in self.buses]
        await until(lambda: all(bus.counts.reconnects > n for bus, n in zip(self.buses, reconnects, strict=True)))

    async def close(self) -> None:
        for bus in self.buses:
            await bus.close()


WORLDS = ("memory", "nats", "nats with 64 KiB messages")


@asynccontextmanager
async def make_world(kind: str, directory: Path) -> AsyncIterator[World]:
    if kind == "memory":
        world = MemoryWorld()
        yield world
        await world.close()
        return
    with NatsServer(directory, max_payload=65536 if "64" in kind else 1024 * 1024) as server:
        world = NatsWorld(server)
        yield world
        await world.close()


async def until(condition: Callable[[], object], seconds: float = SOON_S) -> None:
    """Wait for a condition that no event announces; fails after ``seconds``."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def soon(awaitable):
    async with asyncio.timeout(SOON_S):
        return await awaitable
