"""Two workers with real engines that the test may freeze, kill and start again, and NATS with them.

The engines reach each other over TCP, as on two machines: there a read needs the holder to live, so a frozen holder is
how a test stands in the middle of a read.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from shared.bus.leg_inbox import Leg
from shared.contracts.inference import Frame, FrameKind, LegKind, LegReport
from shared.contracts.kv_exchange import KvOffer, KvTransferReport
from shared.contracts.workers import WorkerPhase
from tests.support.kv_driver import Driver, driving
from tests.support.kv_tap import Tap
from tests.support.nats_server import NatsServer
from tests.support.prompts import VOCABULARY
from tests.support.worker_processes import WorkerProcess, start_worker, wait_ready

PREFILL, DECODE = "p1", "d1"
LEASE_S = 6.0
CHUNK_TOKENS = 256
"""Of a prompt, computed in one step of the prefill engine."""
DECODE_KV_BYTES = 8 * 2**20
"""64 blocks, of which one is vLLM's own: two long prompts fill it."""
START_S_MAX = 400.0
LEG_S_MAX = 40.0
"""The longest that any leg of these tests may take, whatever breaks."""
READ_BEGUN_S = 0.5
ENVIRON = {"UCX_TLS": "tcp,self"}


@dataclass
class Pair:
    """See the module."""

    nats: NatsServer
    folder: Path
    prefill: WorkerProcess
    decode: WorkerProcess

    @contextmanager
    def frozen_prefill_engine(self) -> Iterator[psutil.Process]:
        """It lives and does nothing, until the block ends or it was killed."""
        core = self.prefill.engine_core()
        core.suspend()
        try:
            yield core
        finally:
            with suppress(psutil.NoSuchProcess):
                core.resume()

    async def restart_prefill(self, tap: Tap) -> None:
        """A new life of the prefill worker."""
        old = tap.loads[PREFILL].epoch
        self.prefill.kill()
        self.prefill = start_prefill(self.nats.url, self.folder)

        def is_back() -> bool:
            load = tap.loads[PREFILL]
            return load.epoch > old and load.phase is WorkerPhase.READY

        await tap.until(is_back, "the prefill worker is back", START_S_MAX)


def start_prefill(url: str, folder: Path) -> WorkerProcess:
    return start_worker(
        url,
        PREFILL,
        folder,
        environ=ENVIRON,
        role="prefill",
        cpu_cores="0",
        kv_lease_s=str(LEASE_S),
        max_model_len="2000",
        engine_args=f"--max-num-batched-tokens {CHUNK_TOKENS}",
    )


def start_decode(url: str, folder: Path) -> WorkerProcess:
    return start_worker(
        url,
        DECODE,
        folder,
        environ=ENVIRON,
        role="decode",
        cpu_cores="1",
        kv_lease_s=str(LEASE_S),
        max_model_len="2000",
        kv_cache_bytes=str(DECODE_KV_BYTES),
    )


@contextmanager
def kv_pair(folder: Path) -> Iterator[Pair]:
    """Two engines: start it once."""
    with NatsServer(folder) as nats:
        pair = Pair(nats, folder, start_prefill(nats.url, folder), start_decode(nats.url, folder))
        try:
            asyncio.run(wait_ready(nats.url, [pair.prefill, pair.decode]))
            yield pair
        finally:
            for worker in (pair.prefill, pair.decode):
                worker.kill()


@asynccontextmanager
async def driver_of(pair: Pair) -> AsyncIterator[Driver]:
    """What one test needs. A worker that the test before has lost is started again: each failure is its own."""
    if pair.prefill.process.poll() is not None:
        pair.prefill = start_prefill(pair.nats.url, pair.folder)
    if pair.decode.process.poll() is not None:
        pair.decode = start_decode(pair.nats.url, pair.folder)
    async with Tap(pair.nats.url) as tap, driving(tap) as driver:

        def ready() -> bool:
            phases = [tap.loads[name].phase for name in (PREFILL, DECODE) if name in tap.loads]
            return phases == [WorkerPhase.READY] * 2

        await tap.until(ready, "both workers are ready", START_S_MAX)
        yield driver


def draw(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(VOCABULARY, k=tokens)


async def begun(leg: Leg) -> list[Frame]:
    """Its frames until the first token is among them."""
    frames: list[Frame] = []
    while not any(frame.kind is FrameKind.DATA for frame in frames):
        frames += await leg.frames()
    return frames


async def rest(leg: Leg, frames: Sequence[Frame] = ()) -> list[Frame]:
    """All frames of a leg, ``frames`` being read already. Raises LegFailed."""
    read = list(frames)
    async with asyncio.timeout(LEG_S_MAX):
        while not read or read[-1].kind is not FrameKind.END:
            read += await leg.frames()
    return read


async def reads(driver: Driver, legs: int) -> None:
    """Wait until decode serves so many legs, and the last has begun to read, which nobody tells while it goes on."""
    await driver.tap.until(lambda: driver.tap.loads[DECODE].legs == legs, f"decode serves {legs}")
    await asyncio.sleep(READ_BEGUN_S)


def tokens_of(frames: Sequence[Frame]) -> list[int]:
    return [token for frame in frames for token in frame.token_ids]


def report_of(frames: Sequence[Frame]) -> tuple[LegReport, KvTransferReport]:
    """What a leg ended with."""
    report = frames[-1].report
    assert report is not None
    assert report.kv is not None, "no transfer_report"
    return report, report.kv


async def two_that_do_not_fit(driver: Driver, first: list[int], second: list[int], **options: Any) -> tuple[Leg, Leg]:
    """Both are decoding; when they have grown by a block or two, the second one is preempted."""
    offers = [await driver.offered(PREFILL, prompt) for prompt in (first, second)]
    legs = []
    for prompt, offer, tokens, more in ((first, offers[0], 600, {}), (second, offers[1], 60, options)):
        fields = {"stream": True, "max_tokens": tokens}
        legs.append(
            await driver.start(
                DECODE,
                LegKind.DECODE,
                prompt,
                kv_transfer=packed(offer),
                kv_sources=[driver.source(PREFILL)],
                fields=fields,
                **more,
            )
        )
    return legs[0], legs[1]


def packed(offer: KvOffer) -> bytes:
    """As it travels in StartLeg."""
    return msgspec.msgpack.encode(offer)


def kill(process: psutil.Process) -> None:
    """No goodbye."""
    process.send_signal(signal.SIGKILL)
    process.send_signal(signal.SIGCONT)
