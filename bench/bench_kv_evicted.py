"""Conversations that every engine has evicted: the next turn's time to first token when their KV comes back from a
store's memory, from its files, and when it is computed, over HTTP and the router.

Each round asks three conversations of one length: one that the store has in memory, one that it has only in files, and
a new one. The new one's KV is offered to the store when the engine is about to evict it, and comes back rounds later.
Before a read from files the kernel's cache of them is dropped.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.bench_kv_turns import NEW_TOKENS, ask
from bench.kv_bench_fleet import BenchFleet, Prompts
from bench.kv_bench_page import median_interval, table, with_interval
from bench.peer_checks import RunFailed
from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import KvExchangeState, KvTransferReport
from shared.contracts.load import StoreState
from tests.support.kv_driver import BLOCK

MEMORY, FILES, COMPUTED = "host memory", "files", "computed"
AIMS = {MEMORY: 0.3, FILES: 0.5}
"""Of the time to first token, as a part of the computed one's."""
STORE, WRITER, READER = "store", "one-rank", "two-ranks"
TOKENS = 4000
HISTORY = (TOKENS - NEW_TOKENS) // BLOCK * BLOCK
"""Tokens that an earlier turn left, in whole blocks."""
IN_ENGINE, IN_MEMORY, IN_FILES = 3.1, 10, 22
"""Conversations that fit."""
AHEAD = IN_MEMORY + 3
"""Conversations that are written before the first is read: then it is in files only."""
ROUNDS_LATER = 2
"""A conversation that was read from files is read from memory so many rounds later; the engine has evicted it then."""
COPIED_S_MAX, QUIET_S, POLL_S = 60.0, 1.5, 0.1
"""Workers ask their engines twice a second what will be evicted."""


def workers_of(model: Path, kv_bytes_per_token: int) -> dict[str, dict[str, str]]:
    """Their settings: an engine of one rank, the store, and an engine of two ranks that replaces the first."""
    held = TOKENS * kv_bytes_per_token
    engine = {
        "model": str(model),
        "served_model_name": "baton-tiny",
        "max_model_len": "5000",
        "role": "both",
        "kv_cache_bytes": str(int(IN_ENGINE * held)),
    }
    return {
        WRITER: {**engine, "cpu_cores": "0"},
        READER: {
            **engine,
            "cpu_cores": "0,1",
            "tensor_parallel_size": "2",
            "kv_cache_bytes": str(int(IN_ENGINE * held / 2)),  # Of each rank, which has half of the heads.
        },
        STORE: {
            "model": str(model),
            "served_model_name": "baton-tiny",
            "role": "store",
            "store_memory_bytes": str(IN_MEMORY * held),
            "store_files_bytes": str(IN_FILES * held),
        },
    }


@dataclass
class Found:
    """Seconds to the first token by engine and way, and the most that the store ever held."""

    times: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    lost: int = 0
    """Conversations that were evicted before the store had them whole."""
    bytes_held: dict[str, int] = field(default_factory=dict)
    bytes_max: dict[str, int] = field(default_factory=dict)

    def ratios(self, engine: str, way: str) -> list[float]:
        """Of each round, to what the same engine computed in it."""
        pairs = zip(self.times[engine, way], self.times[engine, COMPUTED], strict=True)
        return [read_s / computed_s for read_s, computed_s in pairs]


@dataclass
class Rounds:
    """One run."""

    fleet: BenchFleet
    folder: Path
    """State of the store."""
    prompts: Prompts = field(default_factory=lambda: Prompts(5))
    written: deque[list[int]] = field(default_factory=deque)
    """Histories that nobody has read since they were computed, the oldest first."""
    loaded: deque[list[int]] = field(default_factory=deque)
    """Histories that were read from files."""
    found: Found = field(default_factory=Found)

    def state(self) -> StoreState:
        return self.fleet.tap.loads[STORE].store or StoreState()

    async def write(self) -> float:
        """A new conversation; its time to first token."""
        prompt = self.prompts.new(TOKENS)
        ttft_s, report = await self.ask(prompt)
        if report.recomputed_tokens < TOKENS:
            raise RunFailed(f"a new prompt was not computed: {report}")
        self.written.append(prompt[:HISTORY])
        await self.until_copied()
        return ttft_s

    async def read_files(self, engine: str) -> float:
        """The next turn of the oldest conversation, which only the store's files have."""
        while (await self.fleet.driver.fetch(STORE, self.written[0])).held < HISTORY // BLOCK:
            self.written.popleft()
            self.found.lost += 1
        history = self.written.popleft()
        self.drop_page_cache()
        before = self.state().loaded_blocks_total
        ttft_s = await self.read(engine, history)
        loaded = lambda: self.state().loaded_blocks_total - before  # noqa: E731
        await self.fleet.tap.until(loaded, "the store says what it loaded")
        if loaded() != HISTORY // BLOCK:
            raise RunFailed(f"{loaded()} blocks came from files, not {HISTORY // BLOCK}: some were in memory")
        self.loaded.append(history)
        return ttft_s

    async def read_memory(self, engine: str) -> float:
        """The next turn of a conversation that the store has loaded, and the engine has evicted since."""
        before = self.state().loaded_blocks_total
        ttft_s = await self.read(engine, self.loaded.popleft())
        if self.state().loaded_blocks_total != before:
            raise RunFailed("blocks came from files, not from memory")
        return ttft_s

    async def read(self, engine: str, history: Sequence[int]) -> float:
        if held := (await self.fleet.driver.fetch(engine, history)).held:
            raise RunFailed(f"{engine} still held {held} blocks")
        ttft_s, report = await self.ask([*history, *self.prompts.new(TOKENS - HISTORY)])
        if (report.fetched_tokens, report.local_tokens) != (HISTORY, 0):
            raise RunFailed(f"not all of the history was read: {report}")
        await self.until_copied()
        return ttft_s

    async def ask(self, prompt: Sequence[int]) -> tuple[float, KvTransferReport]:
        await self.fleet.until_idle()
        ttft_s, _answer, name = await ask(self.fleet, prompt, 2, mode="aggregated")
        return ttft_s, (await self.fleet.tap.legs_of(name))[LegKind.AGGREGATED].transfer_report

    async def until_copied(self) -> None:
        """Until the store has what the engine is about to evict, and has saved it."""
        seen, quiet_at, deadline = None, time.monotonic(), time.monotonic() + COPIED_S_MAX
        while time.monotonic() - quiet_at < QUIET_S:
            self.note_sizes()
            now = tuple(self.changes())
            if now != seen or self.state().saves_waiting:
                seen, quiet_at = now, time.monotonic()
            if time.monotonic() > deadline:
                raise RunFailed(f"copies did not end within {COPIED_S_MAX:g} s: {self.state()}")
            await asyncio.sleep(POLL_S)

    def changes(self) -> Iterator[int]:
        for load in self.fleet.tap.loads.values():
            exchange, store = load.exchange or KvExchangeState(), load.store or StoreState()
            yield from (exchange.copied_blocks_total, exchange.lost_blocks_total, exchange.reads)
            yield from (store.saved_blocks_total, store.loaded_blocks_total)

    def note_sizes(self) -> None:
        state, file = self.state(), self.folder / "kv-store" / STORE / "blocks"
        held = {
            MEMORY: state.host_blocks * state.block_bytes,
            FILES: max(state.disk_blocks * state.block_bytes, file.stat().st_blocks * 512),
        }
        for tier, size in held.items():
            self.found.bytes_held[tier] = max(size, self.found.bytes_held.get(tier, 0))

    def drop_page_cache(self) -> None:
        """Have the next read of the store's files come from the disk."""
        descriptor = os.open(self.folder / "kv-store" / STORE / "blocks", os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


async def measure(fleet: BenchFleet, workers: Mapping[str, Mapping[str, str]], folder: Path, rounds: int) -> Found:
    """``fleet``: writer and store, whose state is in ``folder``. Raises RunFailed."""
    run = Rounds(fleet, folder)
    settings = workers[STORE]
    run.found.bytes_max = {MEMORY: int(settings["store_memory_bytes"]), FILES: int(settings["store_files_bytes"])}
    for _conversation in range(AHEAD):
        await run.write()
    await measure_engine(run, WRITER, rounds)
    await fleet.replace(WRITER, READER, **workers[READER])
    run.loaded.clear()
    await measure_engine(run, READER, rounds)
    return run.found


async def measure_engine(run: Rounds, engine: str, rounds: int) -> None:
    for number in range(rounds + ROUNDS_LATER):
        files_s, computed_s = await run.read_files(engine), await run.write()
        if number < ROUNDS_LATER:
            continue
        took = {MEMORY: await run.read_memory(engine), FILES: files_s, COMPUTED: computed_s}
        for way, seconds in took.items():
            run.found.times.setdefault((engine, way), []).append(seconds)


def lines(found: Found, rounds: int, kv_bytes_per_token: int) -> list[str]:
    """The part of the page."""
    rows: list[list[object]] = []
    for engine, ranks in ((WRITER, 1), (READER, 2)):
        for way in (MEMORY, FILES, COMPUTED):
            cells = ["", ""]
            if way in AIMS:
                ratios = found.ratios(engine, way)
                is_met = median_interval(ratios)[1] <= AIMS[way]
                cells = [with_interval(ratios, ".2f"), f"{AIMS[way]} {'met' if is_met else 'missed'}"]
            rows.append([ranks, way, with_interval(found.times[engine, way], ".0f", 1e3), *cells])
    sizes: list[list[object]] = [
        [tier, f"{found.bytes_held[tier] / 1e6:.1f}", f"{found.bytes_max[tier] / 1e6:.1f}"] for tier in (MEMORY, FILES)
    ]
    return [
        "## A conversation that every engine has evicted",
        "",
        f"Over HTTP and the router, {TOKENS} tokens, of which the last {TOKENS - HISTORY} are new, {kv_bytes_per_token // 1024} KB of KV per token. A store",
        f"has {IN_MEMORY} conversations in memory and {IN_FILES} in files; engines hold {IN_ENGINE:g}. An engine of one rank wrote all that is",
        "read, and was stopped before the engine of two ranks started. Files: read from the disk, without the kernel's",
        f"cache of them. {rounds} rounds for each engine, of one request each way; a ratio is between requests of one round: the",
        "median with its interval (sign test, 95%). An aim is met if the whole interval is below it. Conversations that were",
        f"evicted before the store had all of them: {found.lost}.",
        "",
        *table("ranks | KV from | TTFT ms | part of computed | aim at most", rows),
        "The most that the store ever held, as it says and as the file system counts:",
        "",
        *table("tier | MB held | MB at most", sizes),
    ]
