"""A changed role survives a crash of the process, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.contracts.channels import CHANGE_ROLE, DRAIN, LOAD, WORKER_RECORDS
from shared.contracts.fleet_orders import ChangeRole, DrainWorker
from shared.contracts.load import LoadReport
from shared.contracts.workers import Role, WorkerRecord
from shared.runtime.settings import CommonSettings
from tests.unit.worker.fakes import WAIT_S_MAX, WORKER, RunningWorker, running_worker

BEFORE = "before the restart"


class Life:
    """One of several of the same worker."""

    def __init__(self, worker: RunningWorker) -> None:
        self._worker = worker

    async def record(self) -> WorkerRecord:
        worker_records = await self._worker.bus.key_value_store(WORKER_RECORDS)
        entry = await worker_records.get(WORKER)
        assert entry is not None
        assert entry.value is not None
        return entry.value

    async def role(self) -> Role:
        return (await self.record()).role

    async def load(self) -> LoadReport:
        told: asyncio.Future[LoadReport] = asyncio.get_running_loop().create_future()
        await self._worker.bus.subscribe(
            LOAD, lambda load, _envelope: None if told.done() else told.set_result(load), worker_id=WORKER
        )
        async with asyncio.timeout(WAIT_S_MAX):
            return await told

    async def takes_on(self, role: Role) -> None:
        order = ChangeRole(worker_id=WORKER, role=role)
        changed = await self._worker.bus.ask(CHANGE_ROLE, order, timeout_s=WAIT_S_MAX)
        assert (changed.role, changed.failure) == (role, "")

    async def crashes(self) -> None:
        self._worker.engine.reason.set_result("out of memory")
        assert await self._exit_code() != 0

    async def is_told_to_leave(self) -> None:
        await self._worker.bus.ask(DRAIN, DrainWorker(worker_id=WORKER), timeout_s=WAIT_S_MAX)
        assert await self._exit_code() == 0

    async def is_ended(self) -> None:
        self._worker.service.stopping.set()
        assert await self._exit_code() == 0

    async def _exit_code(self) -> int:
        assert self._worker.exit is not None
        async with asyncio.timeout(WAIT_S_MAX):
            return await self._worker.exit


@asynccontextmanager
async def life(folder: Path, role: Role) -> AsyncIterator[Life]:
    """With ``role`` in its settings; it is ready."""
    async with running_worker(common=CommonSettings(state_dir=str(folder)), role=role) as worker:
        yield Life(worker)


async def test_a_changed_role_survives_crashes_and_is_noted(tmp_path):
    async with life(tmp_path, Role.PREFILL) as first:
        assert await first.role() is Role.PREFILL
        await first.takes_on(Role.DECODE)
        await first.crashes()

    for _again in range(2):
        async with life(tmp_path, Role.PREFILL) as later:
            record = await later.record()
            assert record.role is Role.DECODE
            assert BEFORE in record.note
            assert (await later.load()).role is Role.DECODE
            await later.crashes()


async def test_settings_changed_since_the_order_win(tmp_path):
    async with life(tmp_path, Role.PREFILL) as first:
        await first.takes_on(Role.DECODE)
        await first.crashes()

    for role in (Role.BOTH, Role.PREFILL):
        async with life(tmp_path, role) as later:
            record = await later.record()
            assert (record.role, record.note) == (role, "")
            await later.crashes()


@pytest.mark.parametrize("end", [Life.is_told_to_leave, Life.is_ended])
async def test_a_drained_worker_restarts_with_the_role_of_its_settings(tmp_path, end):
    async with life(tmp_path, Role.PREFILL) as first:
        await first.takes_on(Role.DECODE)
        await end(first)

    async with life(tmp_path, Role.PREFILL) as later:
        assert await later.role() is Role.PREFILL


async def test_a_change_back_to_the_settings_role_forgets_the_saved_one(tmp_path):
    async with life(tmp_path, Role.PREFILL) as first:
        await first.takes_on(Role.DECODE)
        await first.takes_on(Role.PREFILL)
        await first.crashes()

    async with life(tmp_path, Role.PREFILL) as later:
        record = await later.record()
        assert (record.role, record.note) == (Role.PREFILL, "")


async def test_an_unwritable_folder_does_not_prevent_the_change(tmp_path):
    folder = tmp_path / "file"
    folder.touch()

    async with life(folder, Role.PREFILL) as first:
        await first.takes_on(Role.DECODE)
        assert await first.role() is Role.DECODE
        await first.crashes()

    async with life(folder, Role.PREFILL) as later:
        assert await later.role() is Role.PREFILL


async def test_an_unreadable_saved_role_is_ignored(tmp_path):
    async with life(tmp_path, Role.PREFILL) as first:
        await first.takes_on(Role.DECODE)
        await first.crashes()
    [kept] = [file for file in tmp_path.rglob("*") if file.is_file()]
    kept.write_bytes(b'{"role":"dec')

    async with life(tmp_path, Role.PREFILL) as later:
        assert await later.role() is Role.PREFILL
