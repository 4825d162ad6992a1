"""The HTTP edge over real sockets: bounds, pipelining, keep-alive, disconnects and all routes but inference."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from services.router.placement.placement import PlacementPolicy
from services.router.service import Router
from services.router.settings import Settings
from services.router.telemetry.tracing import Tracing
from shared.bus.frame_sender import LegFrames
from shared.contracts.inference import StartLeg
from shared.http.protocol import EdgeProtocol
from shared.http.server import PortTaken, Server, listen, make_server
from shared.runtime.clock import SystemClock
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.unit.router.fake_worker import DONE, EVENTS, SSE, WHOLE_RESPONSE, FakeWorker, serve_leg
from tests.unit.router.world import COMPLETIONS, prompt

PATIENCE_S = 60.0


class Running:
    def __init__(
        self, router: Router, server: Server, serving: asyncio.Task[None], worker: FakeWorker, port: int
    ) -> None:
        self.router = router
        self.server = server
        self.serving = serving
        self.worker = worker
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def connections(self) -> list[EdgeProtocol]:
        """The open connections."""
        return list(self.server.server_state.connections)

    async def raw(self, data: bytes) -> bytes:
        """Send bytes, half-close nothing, read until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        async with asyncio.timeout(PATIENCE_S):
            response = await reader.read()
        writer.close()
        return response


@asynccontextmanager
async def running(**settings: object) -> AsyncIterator[Running]:
    hub = MemoryHub()
    bus = MemoryBus(hub)
    router = Router(
        Settings(log_requests=False, **settings),
        bus,
        SystemClock(),
        Tracing(),
        placement=PlacementPolicy(silent_s_max=60.0),
    )
    await router.open()
    worker = FakeWorker(MemoryBus(hub), "w1")
    await worker.join()
    listener = listen("127.0.0.1", 0)
    server = make_server(router.edge)
    async with asyncio.TaskGroup() as tasks:
        router.start(tasks)
        serving = tasks.create_task(server.serve(sockets=[listener]))
        await server.listening.wait()
        while not router.fleet.cluster.workers:
            await asyncio.sleep(0)
        try:
            yield Running(router, server, serving, worker, listener.getsockname()[1])
        finally:
            server.stop()
            await serving
            await router.close()
            for task in list(tasks._tasks):
                task.cancel()


async def until(happened) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not happened():
            await asyncio.sleep(0.005)


def request(body: bytes, *headers: str, path: str = COMPLETIONS, version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "host: x", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


BODY = json.dumps(prompt()).encode()


async def test_a_server_without_connections_ends_without_waiting():
    async with running() as up:
        up.server.stop()
        for _turn in range(10):
            await asyncio.sleep(0)

        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", up.port)


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_request_that_has_arrived_when_the_server_stops_is_answered(is_kept: bool):
    """It lies in the socket: the loop has not looked since."""
    health = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    answers = b""
    async with running() as up:
        with socket.create_connection(("127.0.0.1", up.port), PATIENCE_S) as client:
            if is_kept:
                client.sendall(health)
                answers = await asyncio.to_thread(client.recv, 65536)
            client.sendall(health)
            up.server.stop()
            while more := await asyncio.to_thread(client.recv, 65536):
                answers += more
            await up.serving

    assert answers.count(b"HTTP/1.1 200") == 1 + is_kept


async def test_a_response_has_a_length_and_keeps_the_connection_open():
    async with running() as up, httpx.AsyncClient() as client:
        for _ in range(3):
            response = await client.post(up.url + COMPLETIONS, json=prompt())
            assert (response.status_code, response.content) == (200, WHOLE_RESPONSE)
            assert "connection" not in response.headers


async def test_streams_are_complete_for_http_1_1_and_1_0():
    async with running() as up, httpx.AsyncClient() as client:
        response = await client.post(up.url + COMPLETIONS, json=prompt(stream=True))
        assert response.content == b"".join(EVENTS) + DONE

        old = await up.raw(request(json.dumps(prompt(stream=True)).encode(), version="1.0"))
        assert old.endswith(b"\r\n\r\n" + b"".join(EVENTS) + DONE)
        assert b"chunked" not in old


async def test_pipelined_requests_get_responses_in_order():
    async with running() as up:
        last = request(BODY, "x-request-id: third", "connection: close")
        responses = await up.raw(request(BODY, "x-request-id: first") + request(BODY, "x-request-id: second") + last)

        order = [responses.index(name) for name in (b"first", b"second", b"third")]
        assert order == sorted(order)
        assert responses.count(b"HTTP/1.1 200 OK") == 3


async def test_a_too_large_content_length_gets_413_and_starts_nothing():
    async with running(body_bytes_max=1000) as up, httpx.AsyncClient() as client:
        response = await client.post(up.url + COMPLETIONS, content=b"x" * 3000)
        again = await client.post(up.url + COMPLETIONS, json=prompt())

        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
        assert again.status_code == 200
        assert len(up.worker.started) == 1


async def test_a_chunked_body_over_the_limit_gets_413():
    async with running(body_bytes_max=1000) as up:
        chunks = b"".join(b"190\r\n" + b"x" * 400 + b"\r\n" for _ in range(4))
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()

        response = await up.raw(head + chunks)

        assert response.startswith(b"HTTP/1.1 413 ")
        assert up.worker.started == []


async def test_a_chunked_body_within_the_limit_is_served():
    async with running() as up:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        half = len(BODY) // 2
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:half], BODY[half:], b""))

        assert b"200 OK" in await up.raw(head + chunks)
        assert up.worker.started[0].body == BODY


async def test_a_missing_body_gets_408():
    async with running(body_s_max=0.1) as up:
        response = await up.raw(request(BODY)[:-5])

        assert response.startswith(b"HTTP/1.1 408 ")


async def test_expect_100_continue_gets_its_interim_response():
    async with running() as up:
        reader, writer = await asyncio.open_connection("127.0.0.1", up.port)
        head, _, body = request(BODY, "expect: 100-continue", "connection: close").partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"
            writer.write(body)
            assert b"200 OK" in await reader.read()
        writer.close()


async def test_endless_headers_are_rejected():
    async with running() as up:
        response = await up.raw(b"POST / HTTP/1.1\r\nx-long: " + b"x" * 66_000)

        assert response.startswith(b"HTTP/1.1 431 ")


async def test_bytes_that_are_not_http_get_400():
    async with running() as up:
        assert (await up.raw(b"\x16\x03\x01 this is not http\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


async def test_a_client_disconnect_cancels_its_leg():
    def stall(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(200, SSE)
        frames.data(EVENTS[0])

    async with running() as up:
        up.worker.script = stall
        reader, writer = await asyncio.open_connection("127.0.0.1", up.port)
        writer.write(request(json.dumps(prompt(stream=True)).encode()))
        await reader.readuntil(EVENTS[0])

        writer.close()

        await until(lambda: up.worker.cancelled)
        await until(lambda: not up.router.relay.in_flight)


async def test_a_full_router_responds_that_it_is_full():
    async with running(requests_at_once_max=0) as up, httpx.AsyncClient() as client:
        response = await client.post(up.url + COMPLETIONS, json=prompt())

        assert (response.status_code, "retry-after" in response.headers) == (503, True)


async def test_an_unknown_mode_gets_400():
    async with running() as up, httpx.AsyncClient() as client:
        response = await client.post(up.url + COMPLETIONS, json=prompt(), headers={"x-baton-mode": "sideways"})

        assert response.status_code == 400


@pytest.mark.parametrize(
    ("path", "holds"),
    [("/health", "healthy"), ("/ready", "ready"), ("/v1/models", '"id":"m"'), ("/metrics", "baton_router")],
)
async def test_state_routes_respond_to_get(path, holds):
    async with running() as up, httpx.AsyncClient() as client:
        response = await client.get(up.url + path)

        assert response.status_code == 200
        assert holds in response.text


async def test_the_ready_route_gives_the_reason():
    async with running() as up, httpx.AsyncClient() as client:
        up.router.bus.lose()
        response = await client.get(up.url + "/ready")

        assert (response.status_code, response.json()["reason"]) == (503, "NATS is not connected")


async def test_fastapi_errors_have_the_openai_shape():
    async with running() as up, httpx.AsyncClient() as client:
        wrong_method = await client.get(up.url + COMPLETIONS)
        nowhere = await client.post(up.url + "/v1/nothing", json={})

        assert (wrong_method.status_code, nowhere.status_code) == (405, 404)
        assert wrong_method.json()["error"]["type"] == nowhere.json()["error"]["type"].replace(
            "NotFoundError", "invalid_request_error"
        )


async def test_the_openapi_document_names_every_status_of_the_edge():
    async with running() as up, httpx.AsyncClient() as client:
        document = (await client.get(up.url + "/openapi.json")).json()

        statuses = set(document["paths"][COMPLETIONS]["post"]["responses"])
        assert {"200", "400", "404", "408", "413", "503", "504"} <= statuses


async def test_metrics_count_requests():
    async with running() as up, httpx.AsyncClient() as client:
        await client.post(up.url + COMPLETIONS, json=prompt())
        await client.post(up.url + COMPLETIONS, json=prompt(model="nope"))

        text = (await client.get(up.url + "/metrics")).text

        assert 'baton_router_requests_total{mode="aggregated",status="200"} 1.0' in text
        assert 'baton_router_refusals_total{reason="model_unknown"} 1.0' in text
        assert 'baton_router_index_state{state="exact",worker_id="w1"}' in text


def test_a_taken_port_is_named_in_the_error():
    with listen("127.0.0.1", 0) as taken, pytest.raises(PortTaken, match="ROUTER_PORT"):
        listen("127.0.0.1", taken.getsockname()[1])


async def test_a_disconnect_before_the_response_breaks_nothing():
    async def slowly(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        await until(lambda: worker.alive is None)
        serve_leg(worker, start, frames)

    async with running() as up, httpx.AsyncClient() as client:
        up.worker.script = slowly
        _reader, writer = await asyncio.open_connection("127.0.0.1", up.port)
        writer.write(request(BODY) + request(BODY) + request(BODY))
        await until(lambda: up.worker.started)
        writer.transport.abort()
        up.worker.alive = None
        await until(lambda: not up.router.relay.in_flight)
        up.worker.script = serve_leg

        assert (await client.post(up.url + COMPLETIONS, json=prompt())).status_code == 200
        assert not up.router.relay.in_flight
