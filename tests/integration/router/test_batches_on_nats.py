"""Batches on a real NATS: a router is killed in the middle of one, and another router goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from services.orchestrator.buckets import KeptFor, make_buckets
from services.router.batches.batches import UNFINISHED_MAX
from services.router.batches.store import SegmentWriter, StoreFailed, read
from shared.bus.frame_sender import LegFrames
from shared.bus.nats_bus import connect_nats
from shared.bus.port import Bus
from shared.contracts.batches import Segment
from shared.contracts.channels import WORKER_RECORDS
from shared.contracts.inference import LegReport, StartLeg
from tests.support.nats_server import NatsServer, free_port
from tests.support.processes import service_process
from tests.unit.router.fake_worker import JSON, FakeWorker

pytestmark = pytest.mark.nats

LINES, AT_ONCE = 400, 8
STOPS_AFTER = 150
WAIT_S_MAX = 120.0
MIB = 1024 * 1024


class Engine:
    """Answers a prompt with itself; after so many prompts only when it ``goes_on``."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.goes_on = asyncio.Event()

    async def __call__(self, _worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        text = msgspec.json.decode(start.body)["prompt"]
        self.prompts.append(text)
        if len(self.prompts) > STOPS_AFTER:
            await self.goes_on.wait()
        frames.head(200, JSON)
        frames.data(msgspec.json.encode({"text": text}))
        frames.end(LegReport(prompt_tokens=9, completion_tokens=3))


async def keep_alive(worker: FakeWorker) -> None:
    """Renew the worker's record, and report."""
    records = await worker.bus.key_value_store(WORKER_RECORDS)
    while True:
        await records.put(worker.record())
        await worker.report()
        await asyncio.sleep(0.5)


@contextlib.asynccontextmanager
async def router(url: str, folder: Path) -> AsyncIterator[tuple[Any, httpx.AsyncClient]]:
    port = free_port()
    settings = {
        "BATON_NATS_URL": url,
        "ROUTER_HOST": "127.0.0.1",
        "ROUTER_PORT": str(port),
        "ROUTER_FILES_BYTES_MAX": str(MIB),
        "ROUTER_BATCH_LINES_AT_ONCE": str(AT_ONCE),
    }
    folder.mkdir()
    with service_process("router", folder, **settings) as process:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as client:
            async with asyncio.timeout(WAIT_S_MAX):
                while not await is_ready(client):
                    await asyncio.sleep(0.1)
            yield process, client


async def is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/ready")).is_success
    except httpx.TransportError:
        return False


async def until(client: httpx.AsyncClient, batch_id: str, is_so: Any) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_S_MAX):
        while not is_so(batch := (await client.get(f"/v1/batches/{batch_id}")).json()):
            await asyncio.sleep(0.05)
    return batch


async def test_another_router_goes_on_with_a_batch_whose_router_was_killed(tmp_path):
    engine = Engine()
    lines = [
        {"custom_id": f"c{n}", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": f"p{n}"}}
        for n in range(LINES)
    ]
    with NatsServer(tmp_path) as server:
        bus = await connect_nats(server.url, name="worker")
        await make_buckets(bus, 5.0)
        worker = FakeWorker(bus, "w1", script=engine)
        await worker.join()
        living = asyncio.create_task(keep_alive(worker))
        async with router(server.url, tmp_path / "one") as (one, client):
            content = b"\n".join(map(msgspec.json.encode, lines))
            form = {"files": {"file": ("in.jsonl", content)}, "data": {"purpose": "batch"}}
            file = (await client.post("/v1/files", **form)).json()
            wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
            made = (await client.post("/v1/batches", json=wanted)).json()
            await until(client, made["id"], lambda now: now["request_counts"]["completed"] == STOPS_AFTER)
            one.kill()
        engine.goes_on.set()
        async with router(server.url, tmp_path / "other") as (_process, other):
            batch = await until(other, made["id"], lambda now: now["status"] == "completed")
            output = (await other.get(f"/v1/files/{batch['output_file_id']}/content")).content
        living.cancel()
        await bus.close()

    assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    found = [msgspec.json.decode(line) for line in output.splitlines()]
    assert len(found) == LINES
    assert {one["custom_id"]: one["response"]["body"]["text"] for one in found} == {
        f"c{n}": f"p{n}" for n in range(LINES)
    }
    assert LINES < len(engine.prompts) <= LINES + AT_ONCE


async def fill(bus: Bus, kept: list[Segment]) -> None:
    for _ in range(40):
        writer = SegmentWriter(bus)
        for piece in (b"x" * 50_000, b"y" * 10_000):
            writer.add(piece)
            await writer.store()
        kept.append(writer.segment)


async def read_again(bus: Bus, segment: Segment, offset: int) -> bytes:
    """As soon as NATS can be asked."""
    async with asyncio.timeout(WAIT_S_MAX):
        while True:
            try:
                return b"".join([piece async for piece in read(bus, [segment], offset)])
            except StoreFailed:
                await asyncio.sleep(0.05)


async def test_a_full_bucket_refuses_bytes_and_keeps_those_that_it_has(tmp_path):
    with NatsServer(tmp_path) as server:
        bus = await connect_nats(server.url, name="router")
        await make_buckets(bus, 5.0, KeptFor(files_bytes_max=MIB))
        kept: list[Segment] = []
        with pytest.raises(StoreFailed, match="maximum bytes exceeded; the bucket is full"):
            await fill(bus, kept)
        server.kill()
        server.start()
        for segment in kept:
            assert await read_again(bus, segment, 49_000) == b"x" * 1000 + b"y" * 10_000
        assert 10 <= len(kept) < 20
        await bus.close()


async def test_batches_that_are_asked_for_at_once_pass_no_bound(tmp_path):
    line = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "p"}}
    with NatsServer(tmp_path) as server:
        bus = await connect_nats(server.url, name="worker")
        await make_buckets(bus, 5.0)
        worker = FakeWorker(bus, "w1", script=lambda _worker, _start, _frames: None)
        await worker.join()
        living = asyncio.create_task(keep_alive(worker))
        async with router(server.url, tmp_path / "one") as (_process, client):
            form = {"files": {"file": ("in.jsonl", msgspec.json.encode(line))}, "data": {"purpose": "batch"}}
            file = (await client.post("/v1/files", **form)).json()
            wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
            asked = [client.post("/v1/batches", json=wanted) for _ in range(UNFINISHED_MAX + 20)]
            statuses = [one.status_code for one in await asyncio.gather(*asked)]
        living.cancel()
        await bus.close()

    assert (statuses.count(200), statuses.count(429)) == (UNFINISHED_MAX, 20)
