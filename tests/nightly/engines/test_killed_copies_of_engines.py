"""A real engine or its store is killed in the middle of a copy to the store.
``tests/nightly/test_killed_copies.py`` has more cases, with simulated engines.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from bench.wide_model import KV_BYTES_PER_TOKEN, make_wide_model
from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import KvGrant
from shared.contracts.load import StoreState
from tests.support.kv_driver import BLOCK, Driver, transfer_report_of
from tests.support.kv_world import KvWorld, driver_of, kv_world
from tests.support.processes import service_process
from tests.support.prompts import random_prompt
from tests.support.system import baton

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

ENGINE, STORE = "engine", "store"
TOKENS = 2048
"""64 MB of KV: a copy takes tens of milliseconds."""
FULL = TOKENS // BLOCK
PROMPT_BYTES = TOKENS * KV_BYTES_PER_TOKEN
IN_ENGINE = 4
"""Prompts that the engine holds."""
MEMORY_BYTES, FILES_BYTES = 10 * PROMPT_BYTES, 16 * PROMPT_BYTES
SETTINGS = {
    ENGINE: {
        "role": "both",
        "cpu_cores": "0",
        "kv_cache_bytes": str(IN_ENGINE * PROMPT_BYTES),
        "max_model_len": "4096",
        "kv_copy_uses_min": "1",
    },
    STORE: {"role": "store", "store_memory_bytes": str(MEMORY_BYTES), "store_files_bytes": str(FILES_BYTES)},
}
SETTLED_S_MAX = 90.0
"""A lease of a killed reader ends within a minute."""
GONE_S_MAX, POLL_S = 30.0, 0.2
SEGMENT = re.compile(r"/dev/shm/\S+")
TRACKER = "resource_tracker"
"""A process of Python that removes what a killed one shared; what ends an engine leaves it."""


@dataclass
class CopyWorld(KvWorld):
    """An engine that offers each prompt to the store, and the store."""

    fillers: int = 0
    segments: set[str] = field(default_factory=set)
    """Shared memory that its processes had mapped."""

    def begin(self, name: str) -> None:
        model = {"model": str(self.folder / "baton-wide"), "served_model_name": "baton-tiny"}
        self.start(name, **model, **SETTINGS[name])

    def processes(self, *names: str) -> list[psutil.Process]:
        """Workers and their engines."""
        roots = [psutil.Process(self.workers[name].process.pid) for name in names]
        every = [one for root in roots for one in (root, *root.children(recursive=True))]
        return [one for one in every if TRACKER not in " ".join(one.cmdline())]

    def note_segments(self) -> None:
        for process in self.processes(ENGINE, STORE):
            self.segments.update(SEGMENT.findall(Path(f"/proc/{process.pid}/maps").read_text()))

    async def doctor_says(self, text: str) -> str:
        """All that it finds once it has found this."""
        deadline = time.monotonic() + GONE_S_MAX
        arguments = ("doctor", "--quick", "--json", "--state-dir", str(self.folder), "--nats-url", self.nats.url)
        while True:
            _code, out, err = await asyncio.to_thread(baton, *arguments)
            found = " | ".join(one["what"] for one in json.loads(out)["findings"])
            if text in found:
                return found
            assert time.monotonic() < deadline, (text, found, err)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[CopyWorld]:
    make_wide_model(tmp_path, Path.home() / ".cache" / "baton")
    with (
        kv_world(tmp_path, CopyWorld) as world,
        service_process("orchestrator", tmp_path, BATON_NATS_URL=world.nats.url),
    ):
        yield world


def store_state(driver: Driver) -> StoreState:
    return driver.tap.loads[STORE].store or StoreState()


def granted_from_now_on(driver: Driver, holder: str, reader: str) -> Callable[[], list[KvGrant]]:
    """Finds the grants that the reader has had since, and not released: it reads their blocks."""
    known = len(driver.tap.grants)

    def reading() -> list[KvGrant]:
        released = {ask_id for release in driver.tap.releases for ask_id in release.ask_ids}
        return [
            grant
            for grant in driver.tap.grants[known:]
            if (grant.worker_id, grant.reader_id) == (holder, reader) and grant.groups and grant.ask_id not in released
        ]

    return reading


async def ask(driver: Driver, prompt: list[int], *, stored: bool) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt came from the store."""
    sources = [driver.source(STORE)] if stored else []
    answer = await driver.leg(ENGINE, LegKind.AGGREGATED, prompt, kv_sources=sources)
    return answer.token_ids, transfer_report_of(answer).fetched_tokens


async def evict(world: CopyWorld, driver: Driver, *prompts: list[int]) -> None:
    """Have the engine lose what it has cached, and the store copy what it computes instead. Of what was copied the engine
    makes room for others first, so that as many prompts as it holds are not enough.
    """
    for _filler in range(2 * IN_ENGINE):
        world.fillers += 1
        await ask(driver, random_prompt(f"filler {world.fillers}", TOKENS), stored=False)
    await driver.tap.until_settled(ENGINE, STORE)
    for prompt in prompts:
        assert (await driver.fetch(ENGINE, prompt)).held == 0


async def copy_and_kill(driver: Driver, victims: list[psutil.Process], prompt: list[int]) -> None:
    """Have the engine compute a prompt that is nowhere, and kill when the store reads it."""
    is_read = granted_from_now_on(driver, ENGINE, STORE)

    def kill() -> bool:
        if not is_read():
            return False
        for process in victims:
            os.kill(process.pid, signal.SIGKILL)
        return True

    leg = asyncio.create_task(driver.leg(ENGINE, LegKind.AGGREGATED, prompt))
    await driver.tap.until(kill, "the store reads")
    leg.cancel()
    with suppress(asyncio.CancelledError, Exception):  # Nobody answers it, perhaps.
        await leg


@pytest.mark.parametrize("killed", [ENGINE, STORE])
async def test_tokens_stay_right_and_nothing_leaks(world: CopyWorld, killed: str):
    old, new = (random_prompt(f"{killed} {name}", TOKENS) for name in ("old", "new"))
    world.begin(ENGINE)
    world.begin(STORE)
    async with driver_of(world) as driver:
        await ask(driver, old, stored=False)
        await driver.tap.until(lambda: store_state(driver).disk_blocks >= FULL, "the old prompt is in files")
        await evict(world, driver, old)
        world.note_segments()
        await copy_and_kill(driver, world.processes(killed), new)
        world.kill(killed)
        found = await world.doctor_says(f"{killed} was lost")
        assert (killed == STORE) == ("with its memory KV of" in found)

    world.begin(killed)
    async with driver_of(world) as driver:
        await driver.tap.until_settled(ENGINE, STORE, s_max=SETTLED_S_MAX)
        await evict(world, driver, old, new)
        for prompt in (old, new):
            held = (await driver.fetch(STORE, prompt)).held
            assert held == FULL or prompt is new, "a copy that had ended is not lost"
            tokens, fetched = await ask(driver, prompt, stored=True)
            assert fetched == min(held * BLOCK, TOKENS - 1)
            assert tokens == await driver.alone(ENGINE, prompt)
        await driver.tap.until_settled(ENGINE, STORE, s_max=SETTLED_S_MAX)
        state = store_state(driver)
        assert (state.damaged_blocks_total, state.unsaved_blocks_total) == (0, 0)
        assert state.host_blocks * state.block_bytes <= MEMORY_BYTES
        assert state.disk_blocks * state.block_bytes <= FILES_BYTES
        world.note_segments()

    for name in (ENGINE, STORE):
        assert world.workers.pop(name).stop() == 0
    deadline = time.monotonic() + GONE_S_MAX
    while left := [segment for segment in world.segments if Path(segment).exists()]:
        assert time.monotonic() < deadline, left
        await asyncio.sleep(POLL_S)
