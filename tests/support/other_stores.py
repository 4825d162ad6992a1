"""A store of somebody else's package beside engines: see ``tests/support/third_party``."""

from __future__ import annotations

import asyncio
from pathlib import Path

from shared.contracts.inference import LegKind
from tests.support.kv_driver import BLOCK, driving, transfer_report_of
from tests.support.kv_tap import Tap
from tests.support.nats_server import NatsServer
from tests.support.prompts import random_prompt
from tests.support.worker_processes import start_worker, wait_ready

THIRD_PARTY = Path(__file__).parent / "third_party"
TOKENS = 20 * BLOCK + 5
PREFILL, DECODE, STORE = "p1", "d1", "s1"


async def reads_what_a_killed_engine_computed(folder: Path, engine: str) -> None:
    """An engine computes a prompt, the store copies it, the engine is killed, and another one reads it from the store: every
    full block, with the tokens of an engine that computes the prompt itself.
    """
    environ = {"BATON_STATE_DIR": str(folder), "PYTHONPATH": f"{Path.cwd()}:{THIRD_PARTY}"}
    settings = {
        PREFILL: {"engine": engine, "role": "prefill", "cpu_cores": "0"},
        DECODE: {"engine": engine, "role": "decode", "cpu_cores": "1"},
        STORE: {"engine": "other", "role": "store", "store_memory_bytes": str(64 << 20), "store_files_bytes": "0"},
    }
    prompt = random_prompt(f"kept by somebody else, {engine}", TOKENS)
    with NatsServer(folder, has_buckets=True) as nats:
        workers = {name: start_worker(nats.url, name, folder, environ=environ, **one) for name, one in settings.items()}
        try:
            await wait_ready(nats.url, [*workers.values()])
            async with Tap(nats.url) as tap, driving(tap) as driver:
                await tap.until(lambda: set(settings) <= set(tap.loads), "all report")
                expected = await driver.alone(DECODE, prompt)
                await driver.leg(PREFILL, LegKind.PREFILL, prompt)
                copied = await driver.fetch(STORE, prompt, driver.source(PREFILL))
                assert (copied.fetched, copied.failure) == (TOKENS // BLOCK, "")
                await asyncio.to_thread(workers[PREFILL].kill)

                answer = await driver.leg(DECODE, LegKind.AGGREGATED, prompt, kv_sources=[driver.source(STORE)])
                (read,) = transfer_report_of(answer).reads
                assert (read.worker_id, read.failure) == (STORE, "")
                assert read.tokens == TOKENS // BLOCK * BLOCK
                assert answer.token_ids == expected
        finally:
            for worker in workers.values():
                worker.kill()
