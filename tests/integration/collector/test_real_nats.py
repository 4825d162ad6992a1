"""The metrics collector as a process: reports on a real NATS are scraped from it and pushed by it."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from shared.bus.nats_bus import connect_nats
from shared.contracts.channels import DISAGGREGATION_REPORT, LOAD, REQUESTS_FINISHED
from shared.contracts.decisions import TtftParts
from shared.contracts.inference import RequestFinished, RequestsFinished
from shared.contracts.planning import AskDisaggregationReport
from shared.telemetry import names
from tests.support.fleet_builders import load
from tests.support.nats_server import free_port
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.processes import service_process

pytestmark = pytest.mark.nats

WAIT_S_MAX = 60.0


def finished(**facts):
    return RequestFinished(
        request_id="r", model="m", path="/v1/completions", mode="disaggregated", status=200, decode_worker="w1", **facts
    )


@pytest.fixture
async def bus(nats_server):
    one = await connect_nats(nats_server.url, name="test")
    yield one
    await one.close()


def collector(nats_server, directory, port, **settings):
    return service_process("collector", directory, BATON_NATS_URL=nats_server.url, COLLECTOR_PORT=str(port), **settings)


async def until_scraped(port, wanted):
    """The first scrape with ``wanted`` in it. Whoever can scrape can be sure that the bus is listened to."""
    async with asyncio.timeout(WAIT_S_MAX), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        while True:
            try:
                if (text := (await client.get("/metrics")).text) and wanted in text:
                    return text
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


async def test_reports_are_scraped_and_the_process_stops_cleanly(nats_server, tmp_path, bus):
    port = free_port()
    with collector(nats_server, tmp_path, port) as process:
        await until_scraped(port, names.FLEET_WORKERS_LOST.name)
        await bus.publish(LOAD, load("w1", running=2))
        one = finished(
            ttft_s=0.02, itl_s=0.01, e2e_s=0.1, prompt_tokens=300, completion_tokens=9, ttft_parts=TtftParts()
        )
        await bus.publish(REQUESTS_FINISHED, RequestsFinished(router_id="r1", requests=[one]))
        wanted = f'{names.WORKER_TTFT.name}_count{{role="both",worker_id="w1"}} 1.0'
        text = await until_scraped(port, wanted)

        assert f'{names.WORKER_RUNNING.name}{{role="both",worker_id="w1"}} 2.0' in text
        report = await bus.ask(DISAGGREGATION_REPORT, AskDisaggregationReport(), timeout_s=WAIT_S_MAX)
        assert [(row.model, row.tokens_min, row.worth) for row in report.buckets] == [("m", 256, "unsure")]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/ready")).status_code == 200
            nats_server.kill()
            async with asyncio.timeout(WAIT_S_MAX):
                while (await client.get("/ready")).status_code != 503:
                    await asyncio.sleep(0.1)
            assert (await client.get("/health")).status_code == 200
        assert process.stop() == 0


async def test_the_same_metrics_are_pushed_as_otlp(nats_server, tmp_path, bus):
    port = free_port()
    with OtlpReceiver() as receiver, collector(nats_server, tmp_path, port, BATON_OTLP_ENDPOINT=receiver.endpoint):
        await until_scraped(port, names.FLEET_WORKERS_LOST.name)
        await bus.publish(LOAD, load("w1", running=2, kv_tokens_used=1, kv_tokens_total=4))
        await bus.publish(REQUESTS_FINISHED, RequestsFinished(router_id="r1", requests=[finished(ttft_s=0.02)]))
        await asyncio.to_thread(receiver.wait_for, lambda: names.WORKER_TTFT.name in receiver.metrics)

        used = receiver.metrics[names.WORKER_KV_USED.name]
        (point,) = used.gauge.data_points
        assert point.as_double == 0.25
        assert used.unit == "1"
        (ttft,) = receiver.metrics[names.FLEET_TTFT.name].histogram.data_points
        assert (ttft.count, ttft.sum) == (1, 0.02)
        assert tuple(ttft.explicit_bounds) == names.FLEET_TTFT.buckets
        assert receiver.metrics[names.FLEET_REQUESTS.name].sum.is_monotonic


async def test_a_dead_otlp_receiver_only_causes_a_warning(nats_server, tmp_path):
    port = free_port()
    dead = f"http://127.0.0.1:{free_port()}"
    with collector(nats_server, tmp_path, port, BATON_OTLP_ENDPOINT=dead) as process:
        await until_scraped(port, names.FLEET_WORKERS_LOST.name)
        async with asyncio.timeout(WAIT_S_MAX):
            while "OTLP receiver does not accept metrics" not in process.log.read_text():
                await asyncio.sleep(0.1)
        await until_scraped(port, names.FLEET_WORKERS_LOST.name)

        assert process.stop() == 0


async def test_the_console_streams_bus_events_and_ends_with_the_process(nats_server, tmp_path, bus):
    port = free_port()
    with collector(nats_server, tmp_path, port) as process:
        await until_scraped(port, names.FLEET_WORKERS_LOST.name)
        async with asyncio.timeout(WAIT_S_MAX), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert "<html" in (await client.get("/console")).text
            async with client.stream("GET", "/console/events") as stream:
                lines = stream.aiter_lines()
                assert await anext(lines) == "event: state"
                one = finished(ttft_s=0.02, decision_id="router-1-d1")
                await bus.publish(REQUESTS_FINISHED, RequestsFinished(router_id="router-1", requests=[one]))
                async for line in lines:
                    if line == "event: request":
                        break
                assert '"decision_id":"router-1-d1"' in await anext(lines)
                stopping = asyncio.get_running_loop().create_task(asyncio.to_thread(process.stop))
                async for _line in lines:
                    pass
                assert await stopping == 0
