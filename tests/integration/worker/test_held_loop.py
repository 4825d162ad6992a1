"""A worker whose event loop is held for a while is not declared lost, and its requests go on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from shared.bus.nats_bus import connect_nats
from shared.contracts.channels import LOAD, WORKER_LOST
from shared.contracts.load import LOOP_LATE_S_MAX, LoadReport
from tests.support.nats_server import NatsServer, free_port
from tests.support.processes import ROOT, service_process

pytestmark = [pytest.mark.nats, pytest.mark.slow]

HELD_WORKER = Path(__file__).with_name("held_worker.py")
HELD_S = 8.0
"""Longer than a worker may be silent."""
TOKENS = 100
READY_S_MAX = 60.0
STREAM_S_MAX = 60.0


class Heard:
    """What workers and the orchestrator say on the bus."""

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self.lost: list[str] = []

    @asynccontextmanager
    async def listening(self, nats_url: str) -> AsyncIterator[None]:
        bus = await connect_nats(nats_url, name="test")
        try:
            await bus.subscribe(LOAD, self._on_load)
            await bus.subscribe(WORKER_LOST, lambda lost, _envelope: self.lost.append(lost.worker_id))
            yield
        finally:
            await bus.close()

    def _on_load(self, report: LoadReport, _envelope: object) -> None:
        if report.loop_late_s:
            self.late_s.append(report.loop_late_s)


@asynccontextmanager
async def system(nats: NatsServer, folder: Path, told: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A router, an orchestrator and one worker."""
    settings = {"BATON_NATS_URL": nats.url, "BATON_STATE_DIR": str(folder)}
    port, log = free_port(), folder / "worker.log"
    worker = {"WORKER_WORKER_ID": "w1", "WORKER_ENGINE": "simulated", "WORKER_SIMULATED": "decode_base_s=0.05"}
    with (
        service_process("orchestrator", folder, **settings),
        service_process("router", folder, ROUTER_PORT=str(port), **settings),
        log.open("wb") as out,
        subprocess.Popen(
            [sys.executable, str(HELD_WORKER), str(told)],
            env={**os.environ, "PYTHONPATH": str(ROOT), **settings, **worker},
            stdout=out,
            stderr=out,
        ) as process,
    ):
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=STREAM_S_MAX) as client:
                async with asyncio.timeout(READY_S_MAX):
                    while not await answers(client):
                        await asyncio.sleep(0.2)
                yield client
        finally:
            process.kill()


async def answers(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.post("/v1/completions", json=body(1))).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def body(tokens: int, *, stream: bool = False) -> dict[str, object]:
    return {"model": "baton-tiny", "prompt": "Once", "max_tokens": tokens, "stream": stream}


async def test_a_loop_that_is_held_for_seconds_loses_no_request(nats_server, tmp_path):
    heard, told = Heard(), tmp_path / "told"
    async with heard.listening(nats_server.url), system(nats_server, tmp_path, told) as client:
        async with client.stream("POST", "/v1/completions", json=body(TOKENS, stream=True)) as answer:
            lines = [line async for line in held_after_first(answer, told) if line.startswith("data: ")]
        assert (await client.post("/v1/completions", json=body(1))).status_code == httpx.codes.OK

    assert len(lines) > 1
    assert lines[-1] == "data: [DONE]"
    assert not any("error" in line for line in lines)
    assert heard.lost == []
    assert LOOP_LATE_S_MAX < max(heard.late_s, default=0.0) < HELD_S + LOOP_LATE_S_MAX


async def held_after_first(answer: httpx.Response, told: Path) -> AsyncIterator[str]:
    """The lines of a stream whose worker is held when the first one has come."""
    async for line in answer.aiter_lines():
        if not told.parent.joinpath("begun").exists():
            told.parent.joinpath("begun").touch()
            told.write_text(str(HELD_S))
        yield line
