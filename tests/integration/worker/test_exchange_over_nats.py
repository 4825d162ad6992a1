"""The exchange of workers on a real NATS: what it costs, and what becomes of it when the server is restarted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median

import pytest

from connector.messages import EngineNotification
from shared.bus.nats_bus import connect_nats
from shared.contracts.kv_exchange import NoGrant, ReleaseKv
from tests.integration.bus.worlds import until
from tests.support.nats_server import NatsServer
from tests.unit.worker.kv_exchange.fakes import OneWorker, exchanging, grant, lease

pytestmark = pytest.mark.nats

BACK_S_MAX = 60.0
ROUND_TRIPS = 200
ROUND_TRIP_S_MAX = 0.02
"""Of the median, with room for a busy machine."""


@asynccontextmanager
async def pair_on(server: NatsServer) -> AsyncIterator[tuple[OneWorker, OneWorker]]:
    """A holder and a reader that know each other."""
    async with AsyncExitStack() as stack:
        buses = [await connect_nats(server.url, name=name) for name in ("h1", "r1")]
        holder = await stack.enter_async_context(exchanging(OneWorker(buses[0], "h1")))
        reader = await stack.enter_async_context(exchanging(OneWorker(buses[1], "r1")))
        await holder.engine.told("peers")
        await reader.engine.told("peers")
        yield holder, reader


async def test_a_lease_request_is_granted_within_the_bound(nats_server):
    async with pair_on(nats_server) as (holder, reader):
        holder.engine.answer = lambda call: EngineNotification(grants=[grant(ask) for ask in call.leases])
        took = []
        for number in range(ROUND_TRIPS):
            begun = time.monotonic()
            reader.engine.tell(leases=[lease(ask_id=f"a{number}")])
            await reader.engine.told("grants", number + 1)
            took.append(time.monotonic() - begun)

        assert median(took) < ROUND_TRIP_S_MAX, took


async def test_a_nats_restart_ends_only_open_asks(nats_server):
    async with pair_on(nats_server) as (holder, reader):
        reader.engine.tell(leases=[lease(ask_id="before")])
        await holder.engine.told("leases")

        nats_server.kill()
        (ended,) = await reader.engine.told("grants")
        assert (ended.ask_id, ended.reason) == ("before", NoGrant.UNREACHABLE)
        await asyncio.to_thread(nats_server.start)
        await until(lambda: holder.bus.connected and reader.bus.connected, BACK_S_MAX)
        await holder.bus.flush(BACK_S_MAX)  # What the server is sent to while it does not know who listens is lost.

        reader.engine.tell(releases=[ReleaseKv(worker_id="h1", epoch=1, reader_id="r1", ask_ids=["before"])])
        released = (await holder.engine.told("releases"))[0]
        assert released.ask_ids == ["before"]
        holder.engine.answer = lambda call: EngineNotification(grants=[grant(ask) for ask in call.leases])
        reader.engine.tell(leases=[lease(ask_id="after")])
        assert (await reader.engine.told("grants", 2))[1].lease_id
        assert reader.engine.every("gone") == holder.engine.every("gone") == []
