"""The prefix index: lookups, updates, memory, and how fast it is rebuilt: ``python -m bench.bench_index``.

Prints Markdown tables. Each measurement runs in its own process, sequentially, ours and the peer's in
turns. ``--peer-python`` names an interpreter in which ``pip install ai-dynamo-runtime`` was done: the same load then
runs on its RadixTree, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from bench.index_load import Load, applied, call_us, rates, rss_bytes, unpacked
from services.router.state.block_table import (
    BOUNDARY,
    IS_COMPILED,
    BlockTable,
    Boundaries,
    PythonBlockTable,
    block_table,
)
from services.router.state.prefix_index import IndexState, PrefixIndex
from shared.contracts.kv_events import KvEvent, KvEventBatch, KvEventKind, KvSnapshot

LOOKUPS = 3000
TABLES = {"native": block_table, "python": PythonBlockTable}
DECODER = msgspec.msgpack.Decoder(KvEventBatch)
SNAPSHOTS = msgspec.msgpack.Decoder(KvSnapshot)
PEER = Path(__file__).with_name("peer_radix_tree.py")
LOADS = {
    "each chain at one worker": {},
    "each chain at 4 workers, 128 blocks of it shared by 64 chains": {"holders": 4, "trunk": 128},
}
ROWS = {
    "found_p50_us": "look-up of a 512-block prompt that is held, µs: p50",
    "found_p99_us": "... p99",
    "found_cpu_us": "... CPU, mean",
    "packed_p50_us": "the same with packed hashes, µs: p50",
    "packed_p99_us": "... p99",
    "packed_cpu_us": "... CPU, mean",
    "absent_p50_us": "look-up of a prompt that no worker holds, µs: p50",
    "absent_p99_us": "... p99",
    "absent_cpu_us": "... CPU, mean",
    "boundary_p50_us": "look-up of the boundary at the end of a prompt that is held, µs: p50",
    "boundary_cpu_us": "... CPU, mean",
    "without_cpu_us": "... of a prompt that is held without any boundary: CPU, mean",
    "window_cpu_us": "... of windows of 32 blocks, all held: CPU, mean",
    "stored_per_s": "blocks stored, from wire bytes: per second",
    "stored_per_cpu_s": "... per second of CPU",
    "removed_per_s": "blocks removed one by one, from wire bytes: per second",
    "removed_per_cpu_s": "... per second of CPU",
    "clear_p50_us": "all blocks of one worker cleared, µs: p50",
    "clear_cpu_us": "... CPU, mean",
    "bytes_per_entry": "memory (RSS) per entry, bytes",
    "held_cpu_us": "is a block held by any worker, µs of CPU",
    "cover_cpu_us": "fewest sources of a chain, µs of CPU",
}


class Ours:
    """Baton's index under the load, fed with wire bytes."""

    def __init__(self, load: Load, table: BlockTable) -> None:
        self.load = load
        self.index = PrefixIndex(table)
        for worker in range(load.workers):
            self.index.join(f"w{worker}", 1)
            self.index.restore(KvSnapshot(worker_id=f"w{worker}", epoch=1, seq=0, hashes=b""))
        self.seqs = [0] * load.workers

    def stored(self, number: int) -> list[bytes]:
        event = KvEvent(kind=KvEventKind.STORED, hashes=self.load.chain(number))
        return [self.batch(worker, event) for worker in self.load.holders_of(number)]

    def removed(self, number: int) -> list[bytes]:
        event = KvEvent(kind=KvEventKind.REMOVED, hashes=self.load.chain(number)[8 * (self.load.blocks // 2) :])
        return [self.batch(worker, event) for worker in self.load.holders_of(number)]

    def batch(self, worker: int, event: KvEvent) -> bytes:
        self.seqs[worker] += 1
        batch = KvEventBatch(worker_id=f"w{worker}", epoch=1, seq=self.seqs[worker], events=[event])
        return msgspec.msgpack.encode(batch)

    def apply(self, packed: bytes) -> None:
        self.index.apply(DECODER.decode(packed))

    def measure(self) -> dict[str, float]:
        load, index = self.load, self.index
        chains = [load.chain(number) for number in load.sample(LOOKUPS)]
        prompts = [list(unpacked(chain)) for chain in chains]
        absent = [[block ^ 1 << 62 for block in prompt] for prompt in prompts]
        before = rss_bytes()
        used = applied(self.stored, range(load.chains()), self.apply)
        said = {"bytes_per_entry": (rss_bytes() - before) / load.entries_exactly()}
        assert sum(map(index.count, index.entries)) == load.entries_exactly()
        said |= rates("stored", load.chains() * load.holders * load.blocks, used)
        for kind, sample in (("found", prompts), ("packed", chains), ("absent", absent)):
            said |= call_us(kind, index.match_depths, sample)
        said |= self.measure_boundaries(prompts, absent)
        assert index.match_depths(prompts[0]).max() == load.blocks
        said |= self.measure_boundaries(prompts, absent)
        everybody = np.ones(len(index.slots), np.bool_)
        said |= call_us("held", index.held, [prompt[100] for prompt in prompts])
        said |= call_us("cover", lambda chain: index.cover(chain, 0, load.blocks, everybody), chains)
        used = applied(self.removed, load.removed_chains(), self.apply)
        said |= rates("removed", len(load.removed_chains()) * load.holders * (load.blocks // 2), used)
        cleared = KvEvent(kind=KvEventKind.CLEARED)
        batches = [self.batch(worker, cleared) for worker in range(0, load.workers, 10)]
        return said | call_us("clear", self.apply, batches)

    def measure_boundaries(self, prompts: list[list[int]], absent: list[list[int]]) -> dict[str, float]:
        """Look-ups in a model with boundaries: some prompts are held without any, then end at one, and at last all
        blocks of windows are held. The workers hold no boundary afterwards.
        """
        index, state, window = self.index, Boundaries(1), Boundaries(1, window_blocks=32)
        rows = range(self.load.workers)
        for row in rows:
            index.table.store(row, BOUNDARY, absent[row % len(absent)][:1])
        said = call_us("without", lambda prompt: index.match_boundaries(prompt, state), prompts)
        holders = [np.flatnonzero(index.match_depths(prompt) == self.load.blocks).tolist() for prompt in prompts]
        holding = [(row, prompt) for those, prompt in zip(holders, prompts, strict=True) for row in those]
        for row, prompt in holding:
            index.table.store(row, BOUNDARY, prompt[-1:])
        said |= call_us("boundary", lambda prompt: index.match_boundaries(prompt, state), prompts)
        assert index.match_boundaries(prompts[0], state).max() == self.load.blocks
        for row, prompt in holding:
            index.table.store(row, BOUNDARY, prompt)
        said |= call_us("window", lambda prompt: index.match_boundaries(prompt, window), prompts)
        assert index.match_boundaries(prompts[0], window).max() == self.load.blocks
        for row in rows:
            index.table.remove(row, BOUNDARY, index.table.blocks(row, BOUNDARY))
        return said


def rebuilt(load: Load, table: BlockTable) -> dict[str, float]:
    """An empty index and the snapshots of all workers, as after a router's start."""
    held: dict[int, list[bytes]] = {}
    for number in range(load.chains()):
        for worker in load.holders_of(number):
            held.setdefault(worker, []).append(load.chain(number))
    snapshots = [
        msgspec.msgpack.encode(KvSnapshot(worker_id=f"w{worker}", epoch=1, seq=7, hashes=b"".join(chains)))
        for worker, chains in held.items()
    ]
    del held
    index = PrefixIndex(table)
    for worker in range(load.workers):
        index.join(f"w{worker}", 1)
    said = call_us("snapshot", lambda packed: index.restore(SNAPSHOTS.decode(packed)), snapshots)
    assert all(index.state(worker_id) is IndexState.EXACT for worker_id in index.entries)
    return {**said, "rebuild_cpu_s": said["snapshot_cpu_us"] * len(snapshots) / 1e6}


def alone(what: str, load: dict[str, int]) -> dict[str, float]:
    """One measurement in a process of its own."""
    command = [sys.executable, "-m", "bench.bench_index", "--alone", what, json.dumps(load)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    said: dict[str, float] = json.loads(done.stdout)
    return said


def peer(python: str, load: dict[str, int]) -> dict[str, float]:
    done = subprocess.run([python, str(PEER), json.dumps(load)], stdout=subprocess.PIPE, text=True, check=True)
    said: dict[str, float] = json.loads(done.stdout)
    return said


def middle(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(run[name] for run in runs) for name in runs[0]}


def compare(options: argparse.Namespace) -> None:
    for title, more in LOADS.items():
        load: dict[str, Any] = {"entries": options.entries, **more}
        runs: dict[str, list[dict[str, float]]] = {}
        for _ in range(options.repeat):
            if IS_COMPILED:
                runs.setdefault("native", []).append(alone("native", load))
            if options.peer_python:
                runs.setdefault("RadixTree", []).append(peer(options.peer_python, load))
        small = {**load, "entries": min(options.entries, options.python_entries)}
        runs[f"Python, {small['entries']:,} entries"] = [alone("python", small)]
        results = {name: middle(of) for name, of in runs.items()}
        print(f"\n{options.entries:,} entries, 1,000 workers, {title}; medians of {options.repeat} runs:\n")
        print(f"| | {' | '.join(results)} |\n|---|{'---:|' * len(results)}")
        for row, meaning in ROWS.items():
            print(f"| {meaning} | {' | '.join(shown(of.get(row)) for of in results.values())} |", flush=True)


def rebuilds(options: argparse.Namespace) -> None:
    print("\nRebuilt from the snapshots of 1,000 workers, from wire bytes:\n")
    print("| entries | table | all, s of CPU | one snapshot keeps the loop, ms: p50 | p99 |\n|---:|---|---:|---:|---:|")
    for entries in (100_000, 1_000_000, 10_000_000):
        for table in ("native", "python")[not IS_COMPILED :]:
            if entries <= options.entries and (table == "native" or entries <= options.python_entries):
                said = alone(f"rebuild-{table}", {"entries": entries, "blocks": min(512, entries // 1000)})
                times = " | ".join(f"{said[f'snapshot_{part}_us'] / 1000:.2f}" for part in ("p50", "p99"))
                print(f"| {entries:,} | {table} | {said['rebuild_cpu_s']:.3f} | {times} |", flush=True)


def shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=10_000_000)
    parser.add_argument("--python-entries", type=int, default=1_000_000, help="for the table in Python")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peer-python", default="")
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        what, load = options.alone[0], Load(**json.loads(options.alone[1]))
        table = TABLES[what.removeprefix("rebuild-")]()
        print(json.dumps(rebuilt(load, table) if what.startswith("rebuild") else Ours(load, table).measure()))
        return
    compare(options)
    rebuilds(options)


if __name__ == "__main__":
    main()
