"""The workers of a data parallel group begin, drain and end together."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import uvloop

from services.worker.engines.port import EngineDead, EngineRefused
from services.worker.lifecycle.drain import DrainPlan
from services.worker.lifecycle.rank_group import RankGroup, join, place_of
from services.worker.meeting import Hello, Place
from services.worker.service import Ending
from services.worker.settings import Settings
from services.worker.tiny_model import ensure_tiny_tokenizer
from shared.contracts.channels import DRAIN, DRAINED, SLEEP
from shared.contracts.fleet_orders import DrainWorker, SleepWorker, WorkerDrained
from shared.contracts.ids import WorkerId
from shared.contracts.load import EngineSpeed
from shared.contracts.workers import Role, WorkerPhase
from shared.engine_speed.learner import combined
from shared.engine_speed.steps import DEFAULT_STEP_TIMES
from tests.support.nats_server import free_port
from tests.unit.worker.simulated_workers import SOON_S_MAX, Workers, workers_on_one_bus

DEFAULT = EngineSpeed(
    **DEFAULT_STEP_TIMES._asdict(), prefill_samples=50.0, decode_samples=50.0, batch_spread=0.1, pairs_per_token=900.0
)
IDS = [WorkerId(f"rank-{rank}") for rank in range(3)]
PLAN = DrainPlan(s_max=5.0, evacuate=True, ordered=True)


def settings_of(rank: int, size: int = 3, **changes: object) -> Settings:
    own = {"data_parallel_size": size, "data_parallel_rank": rank, "data_parallel_group": "g", **changes}
    return Settings(worker_id=f"rank-{rank}", **own)


def place(tmp_path: Path, rank: int, size: int = 3, **changes: object) -> Place:
    return place_of(settings_of(rank, size, **changes), str(tmp_path))


def nothing(_detail: str) -> None:
    pass


async def group_of(tmp_path: Path, **changes: object) -> list[RankGroup]:
    async with asyncio.timeout(SOON_S_MAX):
        ranks = (join(place(tmp_path, rank, **changes), 7000 + rank, nothing) for rank in range(3))
        return list(await asyncio.gather(*ranks))


@pytest.fixture(params=["one host", "several hosts"])
def where(request: pytest.FixtureRequest) -> dict[str, object]:
    """Settings for the group's connection."""
    return {} if request.param == "one host" else {"head_address": f"127.0.0.1:{free_port()}"}


async def test_all_learn_where_the_engines_find_each_other(tmp_path: Path):
    said: list[str] = []
    first = asyncio.create_task(join(place(tmp_path, 0), 7000, said.append))
    second = asyncio.create_task(join(place(tmp_path, 1), 0, nothing))
    async with asyncio.timeout(SOON_S_MAX):
        while not any("2 of 3 here" in each for each in said):
            await asyncio.sleep(0)
        third = await join(place(tmp_path, 2), 0, nothing)
        groups = [await first, await second, third]

    assert [group.port for group in groups] == [7000, 7000, 7000]
    for group in groups:
        group.close()


@pytest.mark.parametrize("ended", [0, 2])
async def test_all_learn_that_one_has_ended(tmp_path: Path, ended: int, where: dict[str, object]):
    groups = await group_of(tmp_path, **where)

    groups[ended].close()

    async with asyncio.timeout(SOON_S_MAX):
        if ended == 0:
            reasons = [await groups[1].lost, await groups[2].lost]
            assert set(reasons) == {"rank 0 of the data parallel group g has ended or cannot be reached"}
        else:
            assert await groups[0].lost == "rank 2 of the data parallel group g has ended or cannot be reached"
            groups[0].close()  # As its worker does then.
            await groups[1].lost


async def test_a_drain_of_one_is_a_drain_of_all_and_none_ends_before_the_others_have_drained(
    tmp_path: Path, where: dict[str, object]
):
    groups = await group_of(tmp_path, **where)
    groups[1].begin_drain(PLAN)
    async with asyncio.timeout(SOON_S_MAX):
        assert [await groups[0].drain_wanted, await groups[2].drain_wanted] == [PLAN, PLAN]
    ends = [asyncio.create_task(groups[rank].end_drain(PLAN)) for rank in (0, 1)]
    done, _waiting = await asyncio.wait(ends, timeout=0.2)
    assert not done

    async with asyncio.timeout(SOON_S_MAX):
        await groups[2].end_drain(PLAN)
        await asyncio.gather(*ends)
    for group in groups:
        group.close()
    await asyncio.sleep(0)
    assert not any(group.lost.done() for group in groups)


async def test_who_is_no_other_rank_of_the_group_is_sent_away(tmp_path: Path):
    of_rank_1 = place(tmp_path, 1, size=2)
    first = asyncio.create_task(join(place(tmp_path, 0, size=2), 7000, nothing))
    wrong = [(Hello(0, of_rank_1.settings), b"there is no rank 0"), (Hello(1, {}), b'"is_final":false')]
    async with asyncio.timeout(SOON_S_MAX):
        for said, answer in [*((msgspec.json.encode(one), answer) for one, answer in wrong), (b"GET /", b"")]:
            reader, writer = await connected(of_rank_1.address)
            writer.write(said + b"\n")
            assert answer in await reader.read()
            writer.close()
        assert not first.done()
        second = await join(of_rank_1, 0, nothing)
        (await first).close()
        second.close()


async def test_a_worker_with_other_settings_is_refused_for_good(tmp_path: Path):
    first = asyncio.create_task(join(place(tmp_path, 0, size=2), 7000, nothing))
    async with asyncio.timeout(SOON_S_MAX):
        with pytest.raises(EngineRefused, match="WORKER_ENGINE_ARGS, WORKER_REVISION: all parts of the data parallel"):
            await join(place(tmp_path, 1, size=2, revision="other", engine_args="--seed 1"), 0, nothing)
    first.cancel()


async def connected(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        try:
            return await asyncio.open_unix_connection(address)
        except OSError:
            await asyncio.sleep(0)


async def test_a_worker_that_ended_before_the_others_came_may_come_again(tmp_path: Path):
    first = asyncio.create_task(join(place(tmp_path, 0, size=2), 7000, nothing))
    async with asyncio.timeout(SOON_S_MAX):
        _reader, writer = await connected(place(tmp_path, 1).address)
        writer.write(msgspec.json.encode(Hello(1, place(tmp_path, 1, size=2).settings)) + b"\n")
        writer.transport.abort()
        second = await join(place(tmp_path, 1, size=2), 0, nothing)
        (await first).close()
        second.close()


def test_processes_find_each_other_on_their_own_kind_of_event_loop(tmp_path: Path):
    """It connects to no socket without a file by itself."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for group in runner.run(group_of(tmp_path)):
            group.close()


async def test_no_new_worker_finds_a_group_that_is_complete(tmp_path: Path):
    groups = await group_of(tmp_path)
    with socket.socket(socket.AF_UNIX) as late, pytest.raises(ConnectionRefusedError):
        late.connect(place(tmp_path, 1).address)
    for group in groups:
        group.close()


def learned(prefill_token_s: float) -> EngineSpeed:
    return msgspec.structs.replace(DEFAULT, prefill_token_s=prefill_token_s)


async def test_all_publish_the_speed_that_they_have_learned_together(tmp_path: Path, where: dict[str, object]):
    """One that has learned nothing publishes it as well."""
    groups = await group_of(tmp_path, **where)
    assert groups[2].speed(None) is None
    assert groups[1].speed(learned(1e-4)) == learned(1e-4)
    together = combined([learned(1e-4), learned(4e-4)])

    async with asyncio.timeout(SOON_S_MAX):
        while groups[0].speed(None) is None and not groups[0]._speeds:
            await asyncio.sleep(0)
        assert groups[0].speed(learned(4e-4)) == together
        for group in groups[1:]:
            while group.speed(None) is None:
                await asyncio.sleep(0)
            assert group.speed(learned(1.0)) == together
    for group in groups:
        group.close()


# Whole workers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_tokenizer(tmp_path_factory.mktemp("models"))


@pytest.fixture
async def workers(model: Path) -> AsyncIterator[Workers]:
    async with workers_on_one_bus(model) as workers:
        yield workers


def start(workers: Workers, tmp_path: Path, rank: int) -> None:
    group = {"data_parallel_size": 3, "data_parallel_rank": rank, "data_parallel_group": str(tmp_path)}
    workers.start(IDS[rank], Role.BOTH, **group, engine="vllm")  # Its settings; the engine is simulated.


async def ready(workers: Workers, tmp_path: Path) -> None:
    for rank in (2, 1):
        start(workers, tmp_path, rank)
    await workers.until(lambda: len(workers.records) == 2)
    assert workers.made == []  # No engine starts before all workers are there.
    start(workers, tmp_path, 0)
    await workers.until_ready(*IDS)


async def test_an_ordered_drain_of_one_worker_drains_the_group(workers: Workers, tmp_path: Path):
    await ready(workers, tmp_path)
    reports: list[WorkerDrained] = []
    await workers.bus.subscribe(DRAINED, lambda report, _envelope: reports.append(report))

    await workers.bus.ask(DRAIN, DrainWorker(worker_id=IDS[2]), timeout_s=SOON_S_MAX)

    async with asyncio.timeout(SOON_S_MAX):
        assert [await workers.exits[each] for each in IDS] == [0, 0, 0]
    assert workers.endings == dict.fromkeys(IDS, Ending.DRAINED)
    assert sorted((report.worker_id, report.ordered) for report in reports) == [(each, True) for each in IDS]


async def test_the_end_of_one_process_ends_the_group_to_be_started_again(workers: Workers, tmp_path: Path):
    await ready(workers, tmp_path)

    workers.services[IDS[1]].stopping.set()

    async with asyncio.timeout(SOON_S_MAX):
        assert [await workers.exits[each] for each in IDS] == [0, 0, 0]
    assert workers.endings == dict.fromkeys(IDS, Ending.STOPPED)


async def test_the_death_of_one_worker_is_the_death_of_all(workers: Workers, tmp_path: Path):
    await ready(workers, tmp_path)

    workers.exits[IDS[1]].cancel()

    async with asyncio.timeout(SOON_S_MAX):
        assert [await workers.exits[each] for each in (IDS[0], IDS[2])] == [1, 1]
        await workers.until(lambda: not workers.records)


async def test_a_worker_of_a_group_does_not_sleep(workers: Workers, tmp_path: Path):
    await ready(workers, tmp_path)

    taken = await workers.bus.ask(SLEEP, SleepWorker(worker_id=IDS[0]), timeout_s=SOON_S_MAX)

    assert "a rank of a data parallel group" in taken.refusal
    assert workers.phase(IDS[0]) is WorkerPhase.READY


async def test_a_group_that_stays_incomplete_ends_with_what_to_do(tmp_path: Path):
    with pytest.raises(EngineDead, match="start 3 workers with its name, the ranks 0 to 2"):
        await join(place(tmp_path, 1), 0, nothing, s_max=0.1)
