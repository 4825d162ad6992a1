"""Real engines of a data parallel group: two workers that compute the experts of a tiny Qwen 3 MoE together, in lock step,
beside an engine that has all experts for itself.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from shared.contracts.failures import Reason
from shared.contracts.inference import LegKind
from tests.support.kv_driver import BLOCK, MODEL, Driver, driving
from tests.support.kv_tap import Tap
from tests.support.model_families import make_model
from tests.support.nats_server import NatsServer
from tests.support.prompts import random_prompt
from tests.support.system import System, is_alive, until
from tests.support.worker_processes import WorkerProcess, gone, ready_workers, start_worker

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

RANKS = ("rank-0", "rank-1")
ALONE = "alone"
LOST_S_MAX = 10.0
"""From the death of a worker to the end of its whole group."""
START_S_MAX, BACK_S_MAX = 600.0, 300.0


@dataclass(frozen=True)
class Running:
    """A group and an engine of its own."""

    nats: NatsServer
    workers: dict[str, WorkerProcess]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("group")
    model = {"model": str(make_model("qwen3-moe", folder)), "served_model_name": MODEL, "max_model_len": "2000"}
    group = {"data_parallel_size": "2", "data_parallel_group": str(folder)}
    with NatsServer(folder, has_buckets=True) as nats:
        starting = [
            start_worker(
                nats.url, name, folder, role="both", cpu_cores=str(rank), data_parallel_rank=str(rank), **group, **model
            )
            for rank, name in enumerate(RANKS)
        ]
        starting.append(start_worker(nats.url, ALONE, folder, role="both", cpu_cores="0", **model))
        with ready_workers(nats.url, *starting) as workers:
            yield Running(nats, dict(zip((*RANKS, ALONE), workers, strict=True)))


@pytest.fixture
async def driver(running: Running) -> AsyncIterator[Driver]:
    async with Tap(running.nats.url) as tap, driving(tap) as driver:
        await tap.until(lambda: running.workers.keys() <= tap.loads.keys(), "all workers say how busy they are")
        yield driver


async def test_each_rank_has_the_tokens_of_one_engine_with_and_without_work_of_the_other(driver: Driver):
    prompts = [random_prompt(f"ranks-{number}", 100 + 37 * number) for number in range(6)]
    expected = [await driver.alone(ALONE, prompt) for prompt in prompts]

    for rank in RANKS:
        assert await driver.alone(rank, prompts[0]) == expected[0]
    together = await asyncio.gather(*(driver.alone(RANKS[n % 2], prompt) for n, prompt in enumerate(prompts)))

    assert together == expected


def test_each_worker_says_which_rank_it_is(running: Running):
    for rank, name in enumerate(RANKS):
        record = running.workers[name].record
        assert record is not None
        assert f"rank {rank} of 2 of the data parallel group" in record.note


async def test_prompts_are_handed_over_within_the_group_and_to_and_from_another_engine(driver: Driver):
    for prefill in (*RANKS, ALONE):
        for decode in (*RANKS, ALONE):
            if prefill != decode:
                await driver.hand_over(prefill, decode, random_prompt(f"{prefill}-{decode}", 400))


async def test_a_rank_fetches_what_the_other_has_cached(driver: Driver):
    prompt = random_prompt("fetched", 500)
    await driver.leg(RANKS[0], LegKind.AGGREGATED, prompt)

    fetched = await driver.fetch(RANKS[1], prompt, driver.source(RANKS[0]))

    assert (fetched.held, fetched.fetched, fetched.failure) == (0, len(prompt) // BLOCK, "")


async def test_a_group_is_lost_as_one_when_a_worker_is_killed(driver: Driver, running: Running):
    """The last test of a group: it ends."""
    first, second = (running.workers[rank] for rank in RANKS)
    children = first.children() + second.children()
    leg = asyncio.create_task(
        driver.leg(RANKS[1], LegKind.AGGREGATED, random_prompt("long", 60), fields={"max_tokens": 1900})
    )
    await driver.tap.until(lambda: driver.tap.loads[RANKS[1]].running == 1, "the leg runs")

    first.process.kill()  # It has vLLM's coordinator.

    async with asyncio.timeout(LOST_S_MAX):
        failure = (await leg).failure
        assert await asyncio.to_thread(second.process.wait, LOST_S_MAX) != 0
    assert failure is not None
    assert failure.reason is Reason.ENGINE_DEAD
    assert re.search("rank 0 of the data parallel group .* has ended", second.log.read_text())
    assert await gone(children)


def test_a_group_comes_back_by_itself_and_another_engine_serves_meanwhile(tmp_path: Path):
    model = make_model("qwen3-moe", tmp_path)
    counts = ("--both", "1", "--decode", "1", "--data-parallel-decode", "2")
    with System(tmp_path / "system", "--model", str(model), *counts) as system:
        system.wait_ready(START_S_MAX)
        before = answer(system)
        epochs = {name: system.fleet()[name]["record"]["epoch"] for name in ("decode-1", "decode-2")}
        pids = {name: psutil.Process(system.worker_pid(name)) for name in epochs}

        pids["decode-2"].kill()

        until(lambda: not any(is_ready(system, name, epochs[name]) for name in epochs), "both are lost", LOST_S_MAX)
        assert answer(system) == before
        until(lambda: not is_alive(pids["decode-1"]), "the other one has ended", LOST_S_MAX)
        until(lambda: all(is_ready(system, name, epochs[name], later=True) for name in epochs), "back", BACK_S_MAX)
        assert answer(system) == before


def answer(system: System) -> str:
    body = {"model": next(iter(system.fleet().values()))["record"]["models"][0], "prompt": "One group, two workers."}
    response = system.http.post("/v1/completions", json={**body, "max_tokens": 24, "temperature": 0})
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def is_ready(system: System, name: str, epoch: int, *, later: bool = False) -> bool:
    """Whether the worker serves in this epoch, or in a later one."""
    worker = system.fleet().get(name)
    if worker is None or worker["phase"] != "ready":
        return False
    return bool(worker["record"]["epoch"] > epoch if later else worker["record"]["epoch"] == epoch)
