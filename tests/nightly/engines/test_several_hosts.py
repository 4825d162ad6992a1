"""An engine over two hosts beside an engine on one of them: network namespaces with a cable between them.

The second host's monotonic clock is a day ahead of the first one's (a time namespace).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from shared.contracts.failures import Reason
from shared.contracts.inference import LegKind
from shared.contracts.workers import WorkerPhase
from tests.engines.kv_boundaries import bytes_at, handshake_of
from tests.support.kv_driver import BLOCK, MODEL, Driver, driving
from tests.support.kv_tap import Tap
from tests.support.model_families import make_model
from tests.support.nats_server import NatsServer
from tests.support.network_hosts import ADDRESSES, DAY_AHEAD, MEETING, Host, two_hosts, typing_on
from tests.support.prompts import random_prompt
from tests.support.worker_processes import Answer, WorkerProcess, gone, start_worker, wait_ready

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

SPLIT, ALONE = "split", "alone"
OVER_TCP = {"UCX_TLS": "tcp,self"}
"""Both namespaces are one machine, whose shared memory UCX would use."""
LOST_S_MAX = 10.0
"""From the loss of a part of the engine to the end of its legs and of its worker."""
BACK_S_MAX = 240.0


@dataclass
class Running:
    nats: NatsServer
    hosts: tuple[Host, Host]
    folder: Path
    settings: dict[str, str]
    head: WorkerProcess
    follower: WorkerProcess

    def start(self, node: int) -> WorkerProcess:
        through = self.hosts[node].arguments(DAY_AHEAD if node else "")
        folder = self.folder / f"node-{node}-{time.monotonic_ns()}"
        folder.mkdir()
        settings = {"role": "both", "node": str(node), "cpu_cores": str(node), **self.settings}
        name = f"{SPLIT}-{node}" if node else SPLIT
        return start_worker(self.nats.url, name, folder, through=through, environ=OVER_TCP, **settings)


@pytest.fixture(scope="module", params=["pipeline", "tensor"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("hosts")
    model = {"model": str(make_model("gemma-3", folder)), "served_model_name": MODEL, "max_model_len": "2000"}
    ranks = {"nodes": "2", f"{request.param}_parallel_size": "2", "head_address": MEETING}
    with (
        two_hosts(folder, OVER_TCP) as hosts,
        typing_on(hosts[0]),
        NatsServer(folder, host=ADDRESSES[0], has_buckets=True) as nats,
    ):
        here = Running(nats, hosts, folder, {**model, **ranks}, None, None)  # type: ignore[arg-type]
        through = hosts[1].arguments("")
        alone = start_worker(
            nats.url, ALONE, folder, role="both", cpu_cores="1", through=through, environ=OVER_TCP, **model
        )
        here.follower, here.head = here.start(1), here.start(0)
        try:
            asyncio.run(wait_ready(nats.url, [alone, here.head]))
            yield here
        finally:
            for worker in (alone, here.head, here.follower):
                worker.kill()


@pytest.fixture
async def driver(running: Running) -> AsyncIterator[Driver]:
    async with Tap(running.nats.url) as tap, driving(tap) as driver:
        await tap.until(lambda: {SPLIT, ALONE} <= tap.loads.keys(), "all workers say how busy they are")
        yield driver


async def test_a_prompt_is_handed_over_between_one_host_and_two(driver: Driver):
    for number in range(3):
        for prefill, decode in ((ALONE, SPLIT), (SPLIT, ALONE)):
            await driver.hand_over(prefill, decode, random_prompt(f"{prefill} {number}", 300 + 400 * number))


async def test_an_engine_over_two_hosts_fetches_what_another_one_has(driver: Driver):
    prompt = random_prompt("fetched", 500)
    await driver.leg(ALONE, LegKind.AGGREGATED, prompt)

    fetched = await driver.fetch(SPLIT, prompt, driver.source(ALONE))

    assert (fetched.held, fetched.fetched, fetched.failure) == (0, len(prompt) // BLOCK, "")
    assert fetched.bytes == bytes_at(await handshake_of(driver, SPLIT), len(prompt) // BLOCK * BLOCK)


async def test_a_rank_that_dies_ends_the_engine_on_both_hosts_and_it_comes_back(driver: Driver, running: Running):
    rank = rank_of(running.follower)
    leg = await long_leg(driver)

    rank.kill()

    await ends_with(leg, running)
    await is_back(driver, running)


async def test_a_broken_link_ends_the_engine_and_it_comes_back(driver: Driver, running: Running):
    leg = await long_leg(driver)

    running.hosts[0].set_link("down")
    try:
        await ends_with(leg, running)
    finally:
        running.hosts[0].set_link("up")

    await is_back(driver, running)


def rank_of(worker: WorkerProcess) -> psutil.Process:
    return next(one for one in worker.children() if "Worker" in " ".join(one.cmdline()))


async def long_leg(driver: Driver) -> asyncio.Task[Answer]:
    leg = asyncio.create_task(
        driver.leg(SPLIT, LegKind.AGGREGATED, random_prompt("long", 60), fields={"max_tokens": 1900})
    )
    await driver.tap.until(lambda: driver.tap.loads[SPLIT].running == 1, "the leg runs")
    return leg


async def ends_with(leg: asyncio.Task[Answer], running: Running) -> None:
    """The leg fails, and both processes of the engine end, with all ranks."""
    begun_at = time.monotonic()
    of_ranks = [*running.head.children(), *running.follower.children()]
    async with asyncio.timeout(LOST_S_MAX):
        failure = (await leg).failure
        for worker in (running.head, running.follower):
            assert await asyncio.to_thread(worker.process.wait, LOST_S_MAX) != 0
    print(f"\nlost after {time.monotonic() - begun_at:.1f} s")
    assert await gone(of_ranks)
    assert failure is not None
    assert failure.reason is Reason.ENGINE_DEAD


async def is_back(driver: Driver, running: Running) -> None:
    """Both processes are started again, as their supervisors do."""
    old = driver.tap.loads[SPLIT].epoch
    running.head, running.follower = running.start(0), running.start(1)

    def ready() -> bool:
        load = driver.tap.loads[SPLIT]
        assert running.head.process.poll() is None, running.head.log.read_text()
        return load.epoch > old and load.phase is WorkerPhase.READY

    await driver.tap.until(ready, "the engine is back", BACK_S_MAX)
    await driver.hand_over(ALONE, SPLIT, random_prompt(f"back {running.head.process.pid}", 400))
