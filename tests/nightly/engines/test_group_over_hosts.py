"""Real engines of a data parallel group on two hosts: network namespaces with a cable between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.contracts.failures import Reason
from shared.contracts.inference import LegKind
from shared.contracts.workers import WorkerPhase
from tests.support.kv_driver import MODEL, Driver, driving
from tests.support.kv_tap import Tap
from tests.support.model_families import make_model
from tests.support.nats_server import NatsServer
from tests.support.network_hosts import ADDRESSES, Host, two_hosts, typing_on
from tests.support.prompts import random_prompt
from tests.support.worker_processes import Answer, WorkerProcess, gone, start_worker, wait_ready

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

RANKS = ("rank-0", "rank-1")
OVER_TCP = {"UCX_TLS": "tcp,self"}
"""Both namespaces are one machine, whose shared memory UCX would use."""
LOST_S_MAX = 10.0
"""From the loss of a rank to the end of the group."""
CUT_OFF_S_MAX = 30.0
"""A worker that is cut off from NATS as well cannot say that it ends, and waits for that in vain."""
BACK_S_MAX = 300.0


@dataclass
class Running:
    nats: NatsServer
    hosts: tuple[Host, Host]
    folder: Path
    settings: dict[str, str]
    workers: list[WorkerProcess]

    def start(self) -> None:
        """Both ranks, the second one first. As launchers do, each is started again when it has ended."""
        self.workers = [self._start(rank) for rank in (1, 0)][::-1]

    def _start(self, rank: int) -> WorkerProcess:
        folder = self.folder / f"{rank}-{time.monotonic_ns()}"
        folder.mkdir()
        own = {"role": "both", "data_parallel_rank": str(rank), "cpu_cores": str(rank), **self.settings}
        through = self.hosts[rank].arguments("")
        return start_worker(self.nats.url, RANKS[rank], folder, through=through, environ=OVER_TCP, **own)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("hosts")
    model = {"model": str(make_model("qwen3-moe", folder)), "served_model_name": MODEL, "max_model_len": "2000"}
    group = {"data_parallel_size": "2", "data_parallel_group": "g", "head_address": f"{ADDRESSES[0]}:9700"}
    with (
        two_hosts(folder, OVER_TCP) as hosts,
        typing_on(hosts[0]),
        NatsServer(folder, host=ADDRESSES[0], has_buckets=True) as nats,
    ):
        here = Running(nats, hosts, folder, {**model, **group}, [])
        here.start()
        try:
            asyncio.run(wait_ready(nats.url, here.workers))
            yield here
        finally:
            for worker in here.workers:
                worker.kill()


@pytest.fixture
async def driver(running: Running) -> AsyncIterator[Driver]:
    async with Tap(running.nats.url) as tap, driving(tap) as driver:
        await tap.until(lambda: tap.loads.keys() >= {*RANKS}, "all workers say how busy they are")
        yield driver


async def test_ranks_on_two_hosts_compute_the_experts_together_and_hand_prompts_over(driver: Driver):
    prompts = [random_prompt(f"hosts-{name}", 150) for name in ("a", "b", "c", "d")]
    expected = [await driver.alone(RANKS[0], prompt) for prompt in prompts]

    together = await asyncio.gather(*(driver.alone(RANKS[1 - n % 2], prompt) for n, prompt in enumerate(prompts)))

    assert together == expected
    for prefill, decode in (RANKS, RANKS[::-1]):
        await driver.hand_over(prefill, decode, random_prompt(f"over from {prefill}", 400))


@pytest.mark.parametrize("loss", ["a rank is killed", "the link is broken"])
async def test_a_group_over_hosts_is_lost_as_one_and_comes_back(driver: Driver, running: Running, loss: str):
    leg = await long_leg(driver)
    of_ranks = [child for worker in running.workers for child in worker.children()]
    epochs = {rank: driver.tap.loads[rank].epoch for rank in RANKS}
    begun_at = time.monotonic()

    if loss == "a rank is killed":
        running.workers[1].process.kill()
    else:
        running.hosts[0].set_link("down")
    try:
        async with asyncio.timeout(LOST_S_MAX):
            failure = (await leg).failure
            assert await asyncio.to_thread(running.workers[0].process.wait, LOST_S_MAX) != 0
            lost_s = time.monotonic() - begun_at
        assert await asyncio.to_thread(running.workers[1].process.wait, CUT_OFF_S_MAX) != 0
    finally:
        running.hosts[0].set_link("up")
    print(f"\n{loss}: lost after {lost_s:.1f} s, all ended after {time.monotonic() - begun_at:.1f} s")
    assert failure is not None
    assert failure.reason is Reason.ENGINE_DEAD
    assert "rank 1 of the data parallel group g has ended or cannot be reached" in running.workers[0].log.read_text()
    assert await gone(of_ranks)

    running.start()
    loads = driver.tap.loads
    await driver.tap.until(
        lambda: all(loads[one].epoch > epochs[one] and loads[one].phase is WorkerPhase.READY for one in RANKS),
        "the group is back",
        BACK_S_MAX,
    )
    await driver.hand_over(*RANKS, random_prompt(f"back after {loss}", 400))


async def long_leg(driver: Driver) -> asyncio.Task[Answer]:
    leg = asyncio.create_task(
        driver.leg(RANKS[0], LegKind.AGGREGATED, random_prompt("long", 60), fields={"max_tokens": 1900})
    )
    await driver.tap.until(lambda: driver.tap.loads[RANKS[0]].running == 1, "the leg runs")
    return leg
