"""KV moves between engines, and between an engine and a store, by another plug-in of NIXL than UCX.

It runs where that plug-in loads: LIBFABRIC needs libfabric with FABRIC_1.10 (newer than 2.6.0), libhwloc and libcuda in
the loader's path. Without EFA it uses libfabric's provider for TCP, or the one that ``FI_PROVIDER`` names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from services.worker.engines.backends import try_backend
from shared.contracts.channels import WORKER_RECORDS
from shared.contracts.inference import LegKind
from shared.contracts.workers import WorkerRecord
from tests.support.kv_driver import BLOCK, driving, transfer_report_of
from tests.support.kv_tap import Tap
from tests.support.nats_server import NatsServer
from tests.support.prompts import random_prompt
from tests.support.worker_processes import start_worker, wait_ready

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

BACKEND = "LIBFABRIC"
PACKAGE = next(filter(find_spec, ("nixl_cu13", "nixl_cu12")), "nixl")
PREFILL, DECODE, STORE = "p1", "d1", "s1"
TOKENS = 600
FULL = TOKENS // BLOCK * BLOCK


@pytest.fixture(params=["vllm", "simulated"])
def nats_url(request, tmp_path: Path) -> Iterator[str]:
    """A system's, with three workers."""
    if why := asyncio.run(try_backend(PACKAGE, BACKEND)):
        pytest.skip(why)
    common = {"engine": request.param, "simulated": "transfer=nixl", "kv_backend": BACKEND}
    roles = {PREFILL: {"role": "prefill", "cpu_cores": "0"}, DECODE: {"role": "decode", "cpu_cores": "1"}}
    roles[STORE] = {"role": "store", "store_files_bytes": "0"}
    with NatsServer(tmp_path, has_buckets=True) as nats:
        started = [start_worker(nats.url, name, tmp_path, **common, **settings) for name, settings in roles.items()]
        try:
            asyncio.run(wait_ready(nats.url, started))
            yield nats.url
        finally:
            for worker in started:
                worker.kill()


async def test_handoffs_and_copies_in_a_store_come_by_libfabric(nats_url: str):
    prompt = random_prompt("by libfabric", TOKENS)
    async with Tap(nats_url) as tap, driving(tap) as driver:
        await tap.until(lambda: {PREFILL, DECODE, STORE} <= set(tap.loads), "all report")
        await driver.hand_over(PREFILL, DECODE, prompt)

        copied = await driver.fetch(STORE, prompt, driver.source(PREFILL))
        assert (copied.fetched, copied.failure) == (TOKENS // BLOCK, "")
        salted = random_prompt("from the store", TOKENS)
        expected = await driver.alone(DECODE, salted)
        await driver.leg(PREFILL, LegKind.PREFILL, salted)
        await driver.fetch(STORE, salted, driver.source(PREFILL))
        answer = await driver.leg(DECODE, LegKind.AGGREGATED, salted, kv_sources=[driver.source(STORE)])
        assert answer.token_ids == expected
        assert transfer_report_of(answer).fetched_tokens == FULL

        registry = await driver.bus.key_value_store(WORKER_RECORDS)
        records: list[WorkerRecord] = [(await registry.get(name)).value for name in (PREFILL, DECODE)]
        assert [read.way for record in records for read in record.kv_reads] == [BACKEND, BACKEND]
        assert all(record.fingerprint.kv_backend == BACKEND for record in records)
