"""The load of ``bench_index``: the same for Baton's index and for a peer's, whose interpreter has neither msgspec nor
numpy. It uses only the standard library; each chain is generated from its number.
"""

from __future__ import annotations

import gc
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

CHAINS_PER_TRUNK = 64
"""Prompts with a common prefix."""
HOLDER_STRIDE = 131
SEED = 4
CHAINS_AT_ONCE = 256
"""Whose events are made outside of the measured time, and then applied."""
REMOVED_SHARE = 0.1
PERCENTILES = (50, 99)


class Load(NamedTuple):
    """Assignment of chains to workers."""

    entries: int
    """(block, worker) pairs, about."""
    workers: int = 1000
    blocks: int = 512
    """In each chain."""
    holders: int = 1
    """Workers that hold a chain."""
    trunk: int = 0
    """Blocks that a chain shares with the others of its trunk."""

    def chains(self) -> int:
        return max(1, self.entries // (self.blocks * self.holders))

    def chain(self, number: int) -> bytes:
        """Packed, big-endian; 63 bits each."""
        trunk = random.Random(f"{SEED} trunk {number // CHAINS_PER_TRUNK}").randbytes(8 * self.trunk)
        packed = trunk + random.Random(f"{SEED} {number}").randbytes(8 * (self.blocks - self.trunk))
        return struct.pack(f">{self.blocks}Q", *(block >> 1 for block in unpacked(packed)))

    def holders_of(self, number: int) -> list[int]:
        return [(number + turn * HOLDER_STRIDE) % self.workers for turn in range(self.holders)]

    def entries_exactly(self) -> int:
        trunks = {
            (number // CHAINS_PER_TRUNK, worker)
            for number in range(self.chains())
            for worker in self.holders_of(number)
        }
        return self.chains() * self.holders * (self.blocks - self.trunk) + self.trunk * len(trunks)

    def removed_chains(self) -> range:
        return range(0, self.chains(), round(1 / REMOVED_SHARE))

    def sample(self, count: int) -> list[int]:
        """Chains to look up."""
        chance = random.Random(SEED)
        return [chance.randrange(self.chains()) for _ in range(count)]


def unpacked(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f">{len(packed) // 8}Q", packed)


def rss_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class TimeUsed(NamedTuple):
    """Seconds."""

    wall: float
    cpu: float
    """CPU of all threads: on a busy machine more meaningful than wall time."""


class Stopwatch:
    """Context manager that adds up time spent inside."""

    def __init__(self) -> None:
        self.used = TimeUsed(0.0, 0.0)

    def __enter__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def __exit__(self, *_exc: object) -> None:
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        self.used = TimeUsed(self.used.wall + wall, self.used.cpu + cpu)


def applied(make: Callable[[int], list[Any]], numbers: range, apply: Callable[[Any], object]) -> TimeUsed:
    """What it takes to apply the events of these chains; making them is not counted."""
    watch = Stopwatch()
    for begin in range(0, len(numbers), CHAINS_AT_ONCE):
        events = [event for number in numbers[begin : begin + CHAINS_AT_ONCE] for event in make(number)]
        with watch:
            for event in events:
                apply(event)
    return watch.used


def rates(name: str, blocks: int, used: TimeUsed) -> dict[str, float]:
    return {f"{name}_per_s": blocks / used.wall, f"{name}_per_cpu_s": blocks / used.cpu}


def call_us(name: str, call: Callable[[Any], object], arguments: list[Any]) -> dict[str, float]:
    """Microseconds of each call: percentiles; and of CPU in the mean."""
    clock, times, watch = time.perf_counter_ns, [], Stopwatch()
    with watch:
        for argument in arguments:
            started = clock()
            call(argument)
            times.append(clock() - started)
    times.sort()
    said = {f"{name}_p{percent}_us": times[len(times) * percent // 100] / 1000 for percent in PERCENTILES}
    return {**said, f"{name}_cpu_us": watch.used.cpu / len(times) * 1e6}
