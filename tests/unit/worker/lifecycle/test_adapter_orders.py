"""A worker loads adapters as ordered, says so in its record, and reads nothing but its folder of adapters."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.worker.engines.adapters import CONFIG, WEIGHTS, AdapterFiles, LoadedAdapters
from shared.contracts.channels import CHANGE_ADAPTER, WORKER_RECORDS
from shared.contracts.fleet_orders import AdapterAction, AdapterChanged, ChangeAdapter
from shared.contracts.workers import LoraAdapter
from tests.unit.worker.fakes import WAIT_S_MAX, WORKER, RunningWorker, running_worker


class Backend:
    """Notes what the registry said when the engine gave up an adapter."""

    def __init__(self) -> None:
        self.worker: RunningWorker | None = None
        self.listed_while_leaving: list[str] = []

    async def enter(self, name: str, files: AdapterFiles) -> str:
        shutil.rmtree(files.folder)
        return f"sha256:{files.digest}"

    async def leave(self, name: str) -> None:
        assert self.worker is not None
        self.listed_while_leaving = [one.name for one in await registered(self.worker)]


async def registered(worker: RunningWorker) -> list[LoraAdapter]:
    entry = await (await worker.bus.key_value_store(WORKER_RECORDS)).get(WORKER)
    assert entry is not None
    assert entry.value is not None
    return entry.value.adapters


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in ("loras/sql", "loras/mail", "secret"):
        adapter = tmp_path / name
        adapter.mkdir(parents=True)
        (adapter / CONFIG).write_text("{}")
        (adapter / WEIGHTS[0]).write_text(name)
    return tmp_path


@pytest.fixture
async def worker(folder) -> AsyncIterator[RunningWorker]:
    backend = Backend()
    adapters = LoadedAdapters(backend, ["m"], folder)
    options = {"lora_dir": str(folder / "loras"), "lora_adapters": "mail=mail"}
    async with running_worker(adapters=adapters, **options) as one:
        backend.worker = one
        one.backend = backend
        yield one


async def change(worker: RunningWorker, action: str, name: str, path: str = "") -> AdapterChanged:
    order = ChangeAdapter(worker_id=WORKER, action=AdapterAction(action), name=name, path=path)
    return await worker.bus.ask(CHANGE_ADAPTER, order, timeout_s=WAIT_S_MAX)


async def test_the_record_lists_what_is_loaded(worker):
    assert [one.name for one in await registered(worker)] == ["mail"]

    done = await change(worker, "load", "sql", "sql")
    (_mail, sql) = await registered(worker)
    assert (done.failure, sql.name, sql.digest) == ("", "sql", done.digest)

    assert (await change(worker, "unload", "sql")).failure == ""
    assert [one.name for one in await registered(worker)] == ["mail"]


async def test_routers_learn_that_an_adapter_goes_before_the_engine_refuses_it(worker):
    assert (await change(worker, "unload", "mail")).failure == ""

    assert worker.backend.listed_while_leaving == []


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "", "nowhere", "x" * 5000])
async def test_nothing_outside_of_the_folder_is_read(worker, folder, path):
    paths = [path, str(folder / "secret")] if path == "../secret" else [path]
    for one in paths:
        done = await change(worker, "load", "bad", one)
        assert done.failure, one
    assert [one.name for one in await registered(worker)] == ["mail"]


async def test_a_worker_without_a_folder_or_without_lora_says_what_to_set(folder):
    async with running_worker() as plain:
        assert "--enable-lora" in (await change(plain, "load", "sql", "sql")).failure
    async with running_worker(adapters=LoadedAdapters(Backend(), ["m"], folder)) as fixed:
        assert "WORKER_LORA_DIR" in (await change(fixed, "load", "sql", "sql")).failure
        assert (await change(fixed, "unload", "sql")).failure


async def test_an_order_during_a_drain_is_refused(worker):
    worker.engine.may_run.clear()
    leg = await worker.leg(body={})
    worker.service.stopping.set()
    async with asyncio.timeout(WAIT_S_MAX):
        while not (failure := (await change(worker, "load", "sql", "sql")).failure):
            await change(worker, "unload", "sql")
    assert "draining" in failure
    worker.engine.may_run.set()
    await worker.read(leg)
