"""A metrics collector with its console on a memory bus, and functions that publish reports to it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import httpx
import msgspec

from services.collector.access import Access, guarded
from services.collector.app import LIMITS, CollectorEdge, add_console, make_app
from services.collector.console.feed import WatcherLimits
from services.collector.service import Collector
from shared.contracts.channels import FLEET_STATE, REQUESTS_FINISHED, SERVICE_STATUS
from shared.contracts.control import ServicePhase, ServiceStatus
from shared.contracts.decisions import TtftParts
from shared.contracts.inference import KvMoved, RequestFinished, RequestsFinished
from shared.contracts.workers import FleetState, FleetWorker, Role
from shared.http.origin import AllowedPages, OriginPolicy
from shared.http.server import listen, make_server
from shared.runtime.clock import SystemClock
from tests.support.fake_clock import FakeClock
from tests.support.fleet_builders import record
from tests.support.memory_bus import MemoryBus, MemoryHub

TWO = WatcherLimits(total=2, for_operators=0, per_address=2)
LOOPBACK = OriginPolicy("COLLECTOR_ALLOWED_HOSTS", AllowedPages(""), checks_host=True)
PARTS = TtftParts(admission_s=0.01, queue_s=0.02, prefill_s=0.1, handoff_s=0.03, decode_prefill_s=0.04)


def finished(**facts):
    defaults = {
        "request_id": "r1",
        "decision_id": "router-1-ab-d00000000000000000000000000000007",
        "model": "m",
        "path": "/v1/completions",
        "mode": "disaggregated",
        "status": 200,
        "prefill_worker": "p1",
        "decode_worker": "d1",
        "prompt_tokens": 100,
        "cached_tokens": 40,
        "completion_tokens": 10,
        "received_tokens": 96,
        "received_bytes": 4096,
        "ttft_s": PARTS.total_s(),
        "itl_s": 0.008,
        "e2e_s": 0.5,
        "ttft_parts": PARTS,
        "kv_moves": [KvMoved(source_id="p1", reader_id="d1", tokens=96, bytes=4096)],
    }
    return RequestFinished(**{**defaults, **facts})


def fleet(*workers, term=1, leader="o1"):
    """A fleet state of these records, each in its own phase."""
    listed = [FleetWorker(record=each, phase=each.phase, since_s=0.0, silent_s=0.0) for each in workers]
    return FleetState(leader=leader, term=term, workers=listed)


def service(name="router", instance="router-1", phase=ServicePhase.READY, detail="", warning=""):
    return ServiceStatus(service=name, instance=instance, phase=phase, detail=detail, warning=warning)


class World:
    def __init__(self, clock, host, key_file, watchers):
        hub = MemoryHub()
        self.bus, self.others, self.clock = MemoryBus(hub), MemoryBus(hub), clock
        self.access = Access(host, key_file)
        self.collector = Collector(self.bus, clock, self.access, watchers)
        app = make_app(lambda _accept: (b"", "text/plain"), lambda: self.bus.connected)
        add_console(app, self.collector.console_context)
        self.app = guarded(app, self.access)

    async def tell(self, channel, message):
        await self.others.publish(channel, message)

    async def finish(self, *requests):
        await self.tell(REQUESTS_FINISHED, RequestsFinished(router_id="router-1-ab", requests=list(requests)))

    async def be_healthy(self):
        """A prefill and a decode worker, a router, an orchestrator."""
        await self.tell(SERVICE_STATUS, service())
        await self.tell(FLEET_STATE, fleet(record("d1", role=Role.DECODE), record("p1", role=Role.PREFILL)))

    def client(self, url="http://127.0.0.1"):
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url=url)


@asynccontextmanager
async def world(clock=None, host="127.0.0.1", key_file="", watchers=TWO):
    one = World(clock or FakeClock(), host, key_file, watchers)
    await one.collector.listen()
    yield one
    await one.bus.close()
    await one.others.close()


@asynccontextmanager
async def serving(one, host="127.0.0.1", origins=LOOPBACK, **limits):
    """Serve its app over real sockets; returns the server and its port."""
    edge = CollectorEdge(
        one.app, SystemClock().now, msgspec.structs.replace(LIMITS, **limits), AllowedPages(""), origins
    )
    server, listener = make_server(edge), listen(host, 0)
    async with asyncio.TaskGroup() as tasks:
        late, running = tasks.create_task(edge.end_late()), tasks.create_task(server.serve(sockets=[listener]))
        await server.listening.wait()
        try:
            yield server, listener.getsockname()[1]
        finally:
            one.collector.feed.close()
            server.stop()
            await running
            late.cancel()
