"""A worker changes its weights as ordered, reads only its folder of checkpoints, and serves with the right ones only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.worker.engines.port import NamedWeights, WeightsRefused
from services.worker.lifecycle.weights import checkpoint_within
from shared.contracts.channels import CHANGE_WEIGHTS, WANTED_WEIGHTS, WORKER_RECORDS
from shared.contracts.fleet_orders import (
    ChangeWeights,
    PauseMode,
    WantedWeights,
    WeightsAction,
    WeightsChanged,
    weights_key,
)
from shared.contracts.workers import HashScheme, WorkerPhase, WorkerRecord
from tests.support.fleet_builders import FINGERPRINT
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.unit.worker.fakes import WAIT_S_MAX, WORKER, RunningWorker, running_worker


class FakeWeights:
    """Notes its calls. ``fails``: names of those that fail."""

    def __init__(self) -> None:
        self.paused = False
        self.calls: list[str] = []
        self.fails: set[str] = set()

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call.partition(" ")[0] in self.fails:
            raise WeightsRefused(f"{call} failed")

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        self._note(f"pause {mode.value} {clear_cache}")
        self.paused = True

    async def resume(self) -> None:
        self._note("resume")
        self.paused = False

    async def begin(self) -> None:
        self._note("begin")

    async def load(self, folder: Path) -> None:
        self._note(f"load {folder.name}")

    async def transfer(self, action: WeightsAction, payload: dict[str, Any]) -> None:
        self._note(f"{action.value} {payload}")

    async def name(self, weights: str, version: str) -> NamedWeights:
        self._note(f"name {weights} {version}")
        fingerprint = msgspec.structs.replace(FINGERPRINT, weights=weights)
        return NamedWeights(fingerprint, HashScheme(block_size=32, seed=weights))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("checkpoints/step-1", "secret", "checkpoints/empty"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("checkpoints/step-1", "secret"):
        (tmp_path / name / "model.safetensors").write_text(name)
    return tmp_path


@pytest.fixture
async def worker(folder: Path) -> AsyncIterator[RunningWorker]:
    async with running_worker(weights=FakeWeights(), weights_dir=str(folder / "checkpoints")) as one:
        yield one


async def change(worker: RunningWorker, action: str, **fields: Any) -> WeightsChanged:
    order = ChangeWeights(worker_id=WORKER, action=WeightsAction(action), **fields)
    return await worker.bus.ask(CHANGE_WEIGHTS, order, timeout_s=WAIT_S_MAX)


async def registered(worker: RunningWorker) -> WorkerRecord:
    entry = await (await worker.bus.key_value_store(WORKER_RECORDS)).get(WORKER)
    assert entry is not None
    assert entry.value is not None
    return entry.value


async def until_phase(worker: RunningWorker, phase: WorkerPhase) -> WorkerRecord:
    async with asyncio.timeout(WAIT_S_MAX):
        while (record := await registered(worker)).phase is not phase:
            await asyncio.sleep(0)
    return record


async def want(hub: MemoryHub, weights: str, **fields: Any) -> None:
    store = await MemoryBus(hub).key_value_store(WANTED_WEIGHTS)
    await store.put(WantedWeights(key=weights_key("m"), model="m", weights=weights, **fields))


async def test_loaded_weights_are_in_the_record_with_the_seed_of_their_block_hashes(worker):
    done = await change(worker, "load", path="step-1", weights="step-1#9", version="step-1")

    record = await registered(worker)
    assert (done.failure, done.weights) == ("", "step-1#9")
    assert worker.engine.weights.calls == ["begin", "load step-1", "name step-1#9 step-1"]
    assert (record.fingerprint.weights, record.hashing.seed) == ("step-1#9", "step-1#9")
    assert record.phase is WorkerPhase.READY


async def test_a_trainers_update_is_named_at_its_end_and_not_before(worker):
    early = [await change(worker, action) for action in ("update", "finish")]
    assert all("no update has begun" in one.failure for one in early)

    await change(worker, "init", payload=b'{"rank_offset":3}')
    await change(worker, "start")
    await change(worker, "update", payload=b'{"names":["w"]}')
    assert (await registered(worker)).fingerprint.weights == ""
    await change(worker, "finish", weights="7#1", version="7")

    assert worker.engine.weights.calls == [
        "init {'rank_offset': 3}", "start {}", "begin", "update {'names': ['w']}", "finish {}", "name 7#1 7",
    ]  # fmt: skip
    assert (await registered(worker)).fingerprint.weights == "7#1"


@pytest.mark.parametrize("failing", ["load", "update"])
async def test_after_a_failed_change_the_worker_ends_and_starts_again(worker, failing):
    worker.engine.weights.fails.add(failing)
    if failing == "load":
        done = await change(worker, "load", path="step-1", weights="a#1")
    else:
        await change(worker, "start")
        done = await change(worker, "update")

    assert done.broken
    async with asyncio.timeout(WAIT_S_MAX):
        assert await worker.exit == 1


@pytest.mark.parametrize("path", ["../secret", "missing", "", "empty", "a\0b", "link"])
async def test_other_folders_are_refused_and_nothing_changes(worker, folder, path):
    (folder / "checkpoints" / "link").mkdir(exist_ok=True)
    (folder / "checkpoints" / "link" / "model.safetensors").symlink_to(folder / "secret" / "model.safetensors")

    done = await change(worker, "load", path=path, weights="a#1")

    assert done.failure
    assert not done.broken
    assert worker.engine.weights.calls == []
    assert (await registered(worker)).phase is WorkerPhase.READY


def test_an_absolute_path_within_the_folder_is_taken(folder):
    within = str(folder / "checkpoints")

    assert checkpoint_within(within, str(folder / "checkpoints" / "step-1")).name == "step-1"
    with pytest.raises(WeightsRefused, match="WORKER_WEIGHTS_DIR"):
        checkpoint_within("", "step-1")


async def test_a_worker_serves_only_with_the_weights_that_its_model_has(folder):
    hub = MemoryHub()
    await want(hub, "step-2#5", path="step-2")
    checkpoints = str(folder / "checkpoints")
    waiting = WorkerPhase.PROBING
    async with running_worker(weights=FakeWeights(), hub=hub, phase=waiting, weights_dir=checkpoints) as worker:
        async with asyncio.timeout(WAIT_S_MAX):
            while "step-2#5" not in (record := await registered(worker)).note:
                await asyncio.sleep(0)
        assert "its weights are those of its start, those of m are step-2#5: they will be loaded" in record.note

        await change(worker, "load", path="step-1", weights="step-2#5")
        await until_phase(worker, WorkerPhase.READY)
        await want(hub, "step-3#6")
        record = await until_phase(worker, WorkerPhase.PROBING)
        assert "its weights are step-2#5, those of m are step-3#6: a trainer sent them" in record.note


async def test_new_weights_are_served_before_the_orchestrator_has_stored_that_they_are_wanted(folder):
    hub = MemoryHub()
    await want(hub, "step-1#1")
    async with running_worker(
        weights=FakeWeights(), hub=hub, phase=WorkerPhase.PROBING, weights_dir=str(folder / "checkpoints")
    ) as worker:
        await change(worker, "load", path="step-1", weights="step-1#1")
        await until_phase(worker, WorkerPhase.READY)
        seen: list[WorkerRecord] = []

        async def follow() -> None:
            async for entry in (await worker.bus.key_value_store(WORKER_RECORDS)).watch():
                seen.extend([entry.value] if entry and entry.value else [])
                if seen and seen[-1].fingerprint.weights == "step-1#3":
                    return

        following = asyncio.create_task(follow())
        for weights in ("step-1#2", "step-1#3"):
            await change(worker, "load", path="step-1", weights=weights)
            await want(hub, weights)
        async with asyncio.timeout(WAIT_S_MAX):
            await following

    assert {record.phase for record in seen} == {WorkerPhase.READY}


async def test_a_worker_of_a_paused_model_begins_paused(folder):
    hub = MemoryHub()
    await want(hub, "", paused=True)
    async with running_worker(weights=FakeWeights(), hub=hub, weights_dir=str(folder)) as worker:
        assert worker.engine.weights.calls == ["pause keep False"]
        await change(worker, "resume")
        assert not worker.engine.weights.paused


async def test_an_engine_without_weights_of_its_own_says_so():
    async with running_worker() as worker:
        done = await change(worker, "pause")

    assert "cannot be changed in place" in done.failure
