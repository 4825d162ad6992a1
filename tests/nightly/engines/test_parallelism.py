"""Handoffs between real engines of different tensor and pipeline parallelism: each rank reads the layers and heads that it
owns, from whichever ranks have them.

The model is a tiny Gemma 3, five of whose six layers have a sliding window, and for states a Granite 4 (Mamba 2). Other
families run in ``test_models.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import psutil
import pytest

from shared.contracts.failures import Reason
from shared.contracts.inference import LegKind
from tests.engines.kv_boundaries import bytes_at, handshake_of, prove_states
from tests.engines.kv_pair import driver_of, family_model, kv_pair
from tests.engines.system.test_real_vllm import Stream, has_begun
from tests.support.kv_driver import BLOCK, MODEL, Driver, driving
from tests.support.kv_tap import Tap
from tests.support.model_families import make_model
from tests.support.nats_server import NatsServer
from tests.support.processes import quietest_cpu
from tests.support.prompts import random_prompt
from tests.support.system import System, until
from tests.support.worker_processes import WorkerProcess, gone, ready_workers, start_worker

pytestmark = [pytest.mark.vllm, pytest.mark.nats]


@dataclass(frozen=True)
class Engine:
    """A worker's ranks and stages."""

    name: str
    settings: Mapping[str, str]
    shape: list[tuple[int, int]]
    """Stage and layers of each rank."""
    environ: Mapping[str, str] = field(default_factory=dict)


BOTH_CORES = {"cpu_cores": "0,1"}
WHOLE = Engine("whole", {"cpu_cores": "0"}, [(0, 6)])
RANKS = Engine("two-ranks", {"tensor_parallel_size": "2", **BOTH_CORES}, [(0, 6), (0, 6)])
STAGES = Engine("two-stages", {"pipeline_parallel_size": "2", **BOTH_CORES}, [(0, 3), (1, 3)])
UNEVEN = Engine(
    "uneven-stages", {"pipeline_parallel_size": "2", **BOTH_CORES}, [(0, 4), (1, 2)], {"VLLM_PP_LAYER_PARTITION": "4,2"}
)
FLEETS = ((WHOLE, RANKS, UNEVEN), (STAGES, UNEVEN))
START_S_MAX, ANSWER_S_MAX = 480.0, 120.0
STREAMS = 4
QUIET_S, QUIET_TRIED = 0.6, 3
LOST_S_MAX = 10.0
"""From the death of a rank to the end of its engine's legs and worker."""


@dataclass(frozen=True)
class Running:
    """A fleet that serves."""

    nats: NatsServer
    engines: tuple[Engine, ...]
    workers: tuple[WorkerProcess, ...]


@pytest.fixture(scope="module", params=FLEETS, ids=lambda fleet: "-".join(one.name for one in fleet))
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    model = {"model": str(make_model("gemma-3", folder)), "served_model_name": MODEL, "max_model_len": "2000"}
    with NatsServer(folder, has_buckets=True) as nats:
        starting = [
            start_worker(nats.url, one.name, folder, role="both", environ=dict(one.environ), **model, **one.settings)
            for one in request.param
        ]
        with ready_workers(nats.url, *starting) as workers:
            yield Running(nats, request.param, workers)


@pytest.fixture
def fleet(running: Running) -> tuple[Engine, ...]:
    return running.engines


@pytest.fixture
async def driver(running: Running) -> AsyncIterator[Driver]:
    names = {one.name for one in running.engines}
    async with Tap(running.nats.url) as tap, driving(tap) as driver:
        await tap.until(lambda: names <= tap.loads.keys(), "all workers say how busy they are")
        yield driver


async def test_each_stage_and_rank_tells_what_it_has(driver: Driver, fleet: tuple[Engine, ...]):
    for engine in fleet:
        handshake = await handshake_of(driver, engine.name)

        assert [(rank.stage, len(rank.layers)) for rank in handshake.ranks] == engine.shape


async def test_a_prompt_is_handed_over_whatever_the_parallelism_of_both_sides(
    driver: Driver, fleet: tuple[Engine, ...]
):
    for prefill in fleet:
        for decode in fleet:
            if prefill is decode:
                continue
            for number in range(3):
                prompt = random_prompt(f"{prefill.name}-{decode.name}-{number}", 300 + 100 * number)
                await driver.hand_over(prefill.name, decode.name, prompt)


async def test_ranks_and_stages_fetch_what_another_engine_has_cached(driver: Driver, fleet: tuple[Engine, ...]):
    source, reader = fleet[0].name, fleet[-1].name
    prompt = random_prompt(f"fetched-{source}", 500)
    await driver.leg(source, LegKind.AGGREGATED, prompt)

    fetched = await driver.fetch(reader, prompt, driver.source(source))

    assert (fetched.held, fetched.fetched, fetched.failure) == (0, len(prompt) // BLOCK, "")
    assert fetched.bytes == bytes_at(await handshake_of(driver, reader), len(prompt) // BLOCK * BLOCK)


async def test_ranks_leave_their_cores_to_others_as_soon_as_an_answer_ends(driver: Driver, running: Running):
    """VLLM's look for further steps for a second, each with all of its core."""
    worker = running.workers[-1]
    stages = stages_of(worker.process.pid)

    for tried in range(QUIET_TRIED):
        await driver.leg(worker.worker_id, LegKind.AGGREGATED, random_prompt(f"quiet {tried}", 60))
        if await asyncio.to_thread(quietest_cpu, [stages], enough=inf, sample_s=QUIET_S) < len(stages) / 3:
            break
    else:
        raise AssertionError("ranks keep their cores busy")


def stages_of(worker: int) -> list[psutil.Process]:
    """The processes of a worker's two pipeline stages."""
    children = psutil.Process(worker).children(recursive=True)
    stages = [one for one in children if "Worker_PP" in " ".join(one.cmdline())]
    assert len(stages) == 2
    return stages


async def test_an_engine_is_lost_as_one_when_a_stage_dies(driver: Driver, running: Running):
    """The last test of a fleet: its last engine ends."""
    worker = running.workers[-1]
    stages = stages_of(worker.process.pid)
    leg = asyncio.create_task(
        driver.leg(worker.worker_id, LegKind.AGGREGATED, random_prompt("long", 60), fields={"max_tokens": 1900})
    )
    await driver.tap.until(lambda: driver.tap.loads[worker.worker_id].running == 1, "the leg runs")

    stages[-1].kill()

    async with asyncio.timeout(LOST_S_MAX):
        failure = (await leg).failure
        assert await asyncio.to_thread(worker.process.wait, LOST_S_MAX) != 0
    assert failure is not None
    assert failure.reason is Reason.ENGINE_DEAD
    assert await gone(stages)


def test_the_ranks_of_an_engine_take_their_parts_of_states_from_one_rank(tmp_path: Path):
    model = replace(family_model("granite-4", tmp_path), decode_settings={"tensor_parallel_size": "2", **BOTH_CORES})
    with kv_pair(tmp_path, model) as pair:

        async def prove() -> None:
            async with driver_of(pair) as driver:
                await prove_states(pair, driver)

        asyncio.run(prove())


def test_streams_of_an_engine_whose_stage_dies_continue_elsewhere_and_it_serves_again(tmp_path: Path):
    fleet = ("--prefill", "0", "--both", "1", "--decode", "1", "--pipeline-decode", "2")
    with System(tmp_path, *fleet) as system:
        system.wait_ready(START_S_MAX)
        undisturbed = [Stream.of_chunks(number).run(system) for number in range(STREAMS)]
        worker, epoch = system.worker_pid("decode-1"), system.fleet()["decode-1"]["record"]["epoch"]
        streams = [stream.again() for stream in undisturbed]
        with ThreadPoolExecutor(STREAMS) as threads:
            running = [threads.submit(stream.run, system) for stream in streams]
            until(lambda: has_begun(streams, running), "each has had some", ANSWER_S_MAX)
            received = [len(stream.events) for stream in streams]
            stages_of(worker)[-1].kill()
            for one in running:
                one.result()

        assert {stream.worker for stream in streams} == {"decode-1"}
        assert all(had < len(stream.events) for had, stream in zip(received, streams, strict=True))
        assert [stream.said() for stream in streams] == [stream.said() for stream in undisturbed]
        assert system.metrics().sum("baton_router_resumes_total") >= STREAMS

        def serves_again() -> bool:
            now = system.fleet()["decode-1"]
            return now["phase"] == "ready" and now["record"]["epoch"] > epoch

        until(serves_again, "the worker is back", START_S_MAX)
        system.until_exact(2)
        again = undisturbed[0].again().run(system)
        assert (again.worker, again.said()) == ("decode-1", undisturbed[0].said())
