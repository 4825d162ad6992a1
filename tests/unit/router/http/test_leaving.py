"""A router that stops: load balancers learn it first, and no client is cut off without a word."""

from __future__ import annotations

import asyncio
import json

import httpx
from opentelemetry.trace import NoOpTracer

from services.router.service import leave
from services.router.settings import LEAVE_S, Settings
from shared.bus.frame_sender import LegFrames
from shared.contracts.control import ServicePhase
from shared.contracts.inference import StartLeg
from shared.runtime.clock import SystemClock
from shared.runtime.service import Service, ServiceFacts
from tests.unit.router.fake_worker import DONE, EVENTS, SSE, FakeWorker, serve_leg
from tests.unit.router.http.test_http_server import Running, request, running, until
from tests.unit.router.world import COMPLETIONS, prompt

STREAM = json.dumps(prompt(stream=True)).encode()


def stopping(up: Running) -> asyncio.Task[None]:
    """The router stops, as after SIGTERM."""
    service = Service(ServiceFacts(name="router", instance="r"), up.router.bus, SystemClock(), NoOpTracer())

    async def stop() -> None:
        await leave(up.router, service, up.server, up.serving)
        assert service.phase is ServicePhase.DRAINING

    return asyncio.create_task(stop())


async def test_ready_says_no_while_requests_are_still_served():
    async with running(leave_s=1.0) as up, httpx.AsyncClient(base_url=up.url) as client:
        assert (await client.get("/ready")).status_code == 200
        left = stopping(up)
        await until(lambda: up.router.edge.leaving)

        ready, alive = await client.get("/ready"), await client.get("/health")
        served = await client.post(COMPLETIONS, json=prompt())

        assert (ready.status_code, alive.status_code, served.status_code) == (503, 200, 200)
        assert "stops" in ready.json()["reason"]
        assert served.headers["connection"] == "close"
        await left


async def test_a_stream_that_does_not_end_in_time_ends_with_an_error_and_whole_chunks():
    async with running(drain_s_max=2.0) as up:
        begun = asyncio.Event()

        async def endless(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
            frames.head(200, SSE)
            frames.data(EVENTS[0], [1])
            begun.set()
            await asyncio.Event().wait()

        up.worker.script = endless
        reading = asyncio.create_task(up.raw(request(STREAM)))
        await begun.wait()
        await stopping(up)

        response = await reading

        assert response.startswith(b"HTTP/1.1 200 ")
        assert EVENTS[0] in response
        assert b"router_stopping" in response
        assert response.endswith(b"0\r\n\r\n")


async def test_a_stream_that_ends_in_time_is_complete():
    async with running(drain_s_max=30.0) as up:
        begun, finish = asyncio.Event(), asyncio.Event()

        async def slow(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
            begun.set()
            await finish.wait()
            serve_leg(worker, start, frames)

        up.worker.script = slow
        reading = asyncio.create_task(up.raw(request(STREAM)))
        await begun.wait()
        left = stopping(up)
        await until(lambda: up.router.edge.leaving)
        finish.set()

        response = await reading
        assert all(event in response for event in (*EVENTS, DONE))
        await left


def test_a_router_for_this_machine_leaves_at_once_and_others_wait_for_balancers():
    assert Settings().leaves_s == 0.0
    assert Settings(host="0.0.0.0", insecure=True).leaves_s == LEAVE_S
    assert Settings(leave_s=9.0, drain_s_max=10.0).leaves_s == 5.0
