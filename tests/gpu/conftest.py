"""Tests on GPUs (``make test-gpu``). Without a GPU they are skipped; ``make test-gpu ON_CPU=1`` rehearses them there."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.bus.nats_bus import connect_nats
from shared.contracts.channels import WORKER_RECORDS
from shared.contracts.workers import WorkerRecord
from tests.gpu.places import GPUS, ON_CPU, Place, place, start
from tests.support.kv_driver import Driver, driving
from tests.support.kv_tap import Tap
from tests.support.nats_server import NatsServer
from tests.support.worker_processes import WorkerProcess, wait_ready

PREFILL, DECODE = "p1", "d1"
CUDA = "import torch, sys; sys.exit(0 if torch.cuda.is_available() else torch.version.cuda or 'a build for CPUs')"
ASK_S_MAX = 120.0


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode worker."""

    nats_url: str
    prefill: WorkerProcess
    decode: WorkerProcess

    async def records(self) -> dict[str, WorkerRecord]:
        """As registered now."""
        bus = await connect_nats(self.nats_url, name="test", connect_s_max=30.0)
        try:
            registry = await bus.key_value_store(WORKER_RECORDS)
            found = [await registry.get(one.worker_id) for one in (self.prefill, self.decode)]
        finally:
            await bus.close()
        return {one.value.worker_id: one.value for one in found if one is not None and one.value is not None}


def why_skipped(gpus_min: int) -> str:
    """Empty if the tests can run."""
    if ON_CPU:
        return ""
    if len(GPUS) < gpus_min:
        return f"needs {gpus_min} NVIDIA GPU(s), nvidia-smi lists {len(GPUS)}"
    asked = subprocess.run([sys.executable, "-c", CUDA], capture_output=True, text=True, timeout=ASK_S_MAX, check=False)
    if asked.returncode:
        return f"PyTorch cannot use the GPU ({asked.stderr.strip()[-200:]}): BATON_ENGINE=cuda make setup"
    return ""


@pytest.fixture(scope="session")
def one_gpu() -> None:
    if why := why_skipped(1):
        pytest.skip(why)


@pytest.fixture(scope="session")
def two_gpus() -> None:
    if why := why_skipped(2):
        pytest.skip(why)


@contextmanager
def running(folder: Path, prefill: Place, decode: Place, **environ: str) -> Iterator[Pair]:
    """Both workers, ready, in these places."""
    with NatsServer(folder, has_buckets=True) as nats:
        pair = Pair(
            nats.url,
            start(nats.url, PREFILL, folder, "prefill", prefill, **environ),
            start(nats.url, DECODE, folder, "decode", decode, **environ),
        )
        try:
            asyncio.run(wait_ready(nats.url, [pair.prefill, pair.decode]))
            yield pair
        finally:
            pair.prefill.kill()
            pair.decode.kill()


@asynccontextmanager
async def driver_of(pair: Pair) -> AsyncIterator[Driver]:
    """Drives the two workers as a router does."""
    async with Tap(pair.nats_url) as tap, driving(tap) as driver:
        await tap.until(lambda: {PREFILL, DECODE} <= tap.loads.keys(), "both workers report their load")
        yield driver


@pytest.fixture(scope="session")
def pair(one_gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One engine on the first GPU and one on the second, or both on the only one."""
    with running(tmp_path_factory.mktemp("pair"), place(0), place(1)) as pair:
        yield pair
