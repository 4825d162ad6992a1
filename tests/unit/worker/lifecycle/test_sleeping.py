"""A worker that sleeps: registered, without an engine, until it is woken, drained or stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.worker.service import Ending
from services.worker.tiny_model import ensure_tiny_tokenizer
from shared.contracts.channels import CHANGE_ROLE, DRAIN, DRAINED, SLEEP, WAKE
from shared.contracts.fleet_orders import ChangeRole, DrainWorker, OrderTaken, SleepWorker, WakeWorker, WorkerDrained
from shared.contracts.ids import WorkerId
from shared.contracts.workers import Role, WorkerPhase
from tests.unit.worker.simulated_workers import SOON_S_MAX, Workers, workers_on_one_bus

ID = WorkerId("w1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_tokenizer(tmp_path_factory.mktemp("models"))


@pytest.fixture
async def workers(model: Path) -> AsyncIterator[Workers]:
    async with workers_on_one_bus(model) as workers:
        yield workers


async def asleep(workers: Workers) -> None:
    workers.start(ID, Role.BOTH, asleep=True, aliases="chat")
    await workers.until(lambda: workers.phase(ID) is WorkerPhase.ASLEEP)


async def order(workers: Workers, *, sleep: bool) -> OrderTaken:
    if sleep:
        return await workers.bus.ask(SLEEP, SleepWorker(worker_id=ID), timeout_s=SOON_S_MAX)
    return await workers.bus.ask(WAKE, WakeWorker(worker_id=ID), timeout_s=SOON_S_MAX)


async def test_a_worker_that_sleeps_says_which_names_wake_it_and_has_no_engine(workers: Workers):
    await asleep(workers)

    record = workers.records[ID]
    assert record.models[1:] == ["chat"]
    assert record.kv_tokens == 0
    assert workers.made == []


async def test_woken_it_starts_its_engine_under_the_same_epoch(workers: Workers):
    await asleep(workers)
    epoch = workers.records[ID].epoch

    assert (await order(workers, sleep=False)).refusal == ""

    await workers.until_ready(ID)
    assert workers.records[ID].epoch == epoch
    assert [phase for _id, _role, phase in workers.said][:2] == [WorkerPhase.ASLEEP, WorkerPhase.STARTING]


async def test_ordered_to_sleep_it_finishes_and_the_process_begins_anew(workers: Workers):
    workers.start(ID, Role.BOTH)
    await workers.until_ready(ID)

    assert (await order(workers, sleep=True)).refusal == ""

    async with asyncio.timeout(SOON_S_MAX):
        assert await workers.exits[ID] == 0
    assert workers.endings == {ID: Ending.ASLEEP}
    assert workers.phase(ID) is None


async def test_a_stop_while_it_falls_asleep_is_a_stop(workers: Workers):
    workers.start(ID, Role.BOTH)
    await workers.until_ready(ID)
    await order(workers, sleep=True)
    workers.services[ID].stopping.set()

    async with asyncio.timeout(SOON_S_MAX):
        await workers.exits[ID]
    assert workers.endings == {ID: Ending.STOPPED}


async def test_a_worker_that_is_not_ready_does_not_sleep(workers: Workers):
    workers.start(ID, Role.BOTH)
    await workers.until_ready(ID)
    await workers.bus.ask(DRAIN, DrainWorker(worker_id=ID), timeout_s=SOON_S_MAX)

    async with asyncio.timeout(SOON_S_MAX):
        await workers.exits[ID]
    assert workers.endings == {ID: Ending.DRAINED}


async def test_a_sleeping_worker_that_is_drained_leaves_with_a_report(workers: Workers):
    reports: list[WorkerDrained] = []
    await workers.bus.subscribe(DRAINED, lambda report, _envelope: reports.append(report))
    await asleep(workers)

    await workers.bus.ask(DRAIN, DrainWorker(worker_id=ID), timeout_s=SOON_S_MAX)

    async with asyncio.timeout(SOON_S_MAX):
        assert await workers.exits[ID] == 0
    assert [(report.worker_id, report.ordered) for report in reports] == [(ID, True)]
    assert workers.endings == {ID: Ending.DRAINED}
    assert workers.made == []


async def test_a_sleeping_worker_keeps_its_role(workers: Workers):
    await asleep(workers)

    order = ChangeRole(worker_id=ID, role=Role.DECODE)
    changed = await workers.bus.ask(CHANGE_ROLE, order, timeout_s=SOON_S_MAX)

    assert changed.role is Role.BOTH
    assert "it is asleep" in changed.failure


async def test_a_sleeping_worker_stops_at_once(workers: Workers):
    await asleep(workers)

    workers.services[ID].stopping.set()

    async with asyncio.timeout(SOON_S_MAX):
        assert await workers.exits[ID] == 0
    assert workers.phase(ID) is None
