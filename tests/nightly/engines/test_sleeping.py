"""A real engine that sleeps frees its memory and processes, and exchanges KV again when it is awake."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import psutil
import pytest

from shared.contracts.channels import SLEEP, WAKE, WORKER_RECORDS
from shared.contracts.fleet_orders import SleepWorker, WakeWorker
from shared.contracts.workers import WorkerPhase, WorkerRecord
from tests.support.kv_driver import BLOCK, Driver, driving, transfer_report_of
from tests.support.kv_tap import Tap
from tests.support.nats_server import NatsServer
from tests.support.prompts import VOCABULARY
from tests.support.worker_processes import READY_S_MAX, WorkerProcess, start_worker, wait_ready

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

STAYS, SLEEPS = "stays", "sleeps"
ORDER_S_MAX = 10.0
ASLEEP_S_MAX = 60.0
ASLEEP_BYTES_MAX = 250 << 20


async def in_phase(driver: Driver, phase: WorkerPhase, s_max: float) -> WorkerRecord:
    worker_records = await driver.bus.key_value_store(WORKER_RECORDS)
    async with asyncio.timeout(s_max):
        while True:
            found = await worker_records.get(SLEEPS)
            if found and found.value and found.value.phase is phase:
                return found.value
            await asyncio.sleep(0.2)


def engine_processes(worker: WorkerProcess) -> list[psutil.Process]:
    return [child for child in worker.children() if child.status() != psutil.STATUS_ZOMBIE]


async def handed_over(driver: Driver, prompt: list[int]) -> list[int]:
    """What the worker that sleeps and wakes answers with the other's KV."""
    answer = await driver.taken(SLEEPS, prompt, await driver.offered(STAYS, prompt))
    assert transfer_report_of(answer).fetched_tokens == len(prompt) // BLOCK * BLOCK
    return answer.token_ids


async def test_an_engine_sleeps_and_wakes_in_the_same_process(tmp_path: Path):
    prompt = random.Random("asleep").choices(VOCABULARY, k=300)
    with NatsServer(tmp_path, has_buckets=True) as nats:
        workers = [
            start_worker(nats.url, name, tmp_path, role=role, cpu_cores=core, max_model_len="2000")
            for name, role, core in ((STAYS, "prefill", "0"), (SLEEPS, "decode", "1"))
        ]
        try:
            await wait_ready(nats.url, workers)
            async with Tap(nats.url) as tap, driving(tap) as driver:
                await tap.until(lambda: {STAYS, SLEEPS} <= tap.loads.keys(), "both workers report")
                await sleeps_and_wakes(driver, workers[1], prompt)
        finally:
            for worker in workers:
                worker.kill()


async def sleeps_and_wakes(driver: Driver, worker: WorkerProcess, prompt: list[int]) -> None:
    expected = await driver.alone(SLEEPS, prompt)
    assert await handed_over(driver, prompt) == expected
    assert engine_processes(worker)

    await driver.bus.ask(SLEEP, SleepWorker(worker_id=SLEEPS), timeout_s=ORDER_S_MAX)
    asleep = await in_phase(driver, WorkerPhase.ASLEEP, ASLEEP_S_MAX)

    assert asleep.pid == worker.process.pid
    assert engine_processes(worker) == []
    assert psutil.Process(worker.process.pid).memory_info().rss < ASLEEP_BYTES_MAX

    await driver.bus.ask(WAKE, WakeWorker(worker_id=SLEEPS), timeout_s=ORDER_S_MAX)
    awake = await in_phase(driver, WorkerPhase.READY, READY_S_MAX)

    assert awake.epoch == asleep.epoch
    assert await driver.alone(SLEEPS, prompt) == expected
    assert await handed_over(driver, prompt) == expected
