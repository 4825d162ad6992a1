"""The load of ``bench_index``: the same for Baton's index and for a peer's, whose interpreter has neither msgspec nor
numpy. So nothing but the standard library in here, and every chain is made from its number when it is needed.
"""

from __future__ import annotations

import gc
import random
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

CHAINS_PER_TRUNK = 64
"""Prompts that begin alike."""
HOLDER_STRIDE = 131
SEED = 4
CHAINS_AT_ONCE = 256
"""Whose events are made outside of the measured time, and then applied."""
REMOVED_SHARE = 0.1
PERCENTILES = (50, 99)


class Load(NamedTuple):
    """Who holds what."""

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

    def asked(self, count: int) -> list[int]:
        """Chains to look up."""
        chance = random.Random(SEED)
        return [chance.randrange(self.chains()) for _ in range(count)]


def unpacked(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f">{len(packed) // 8}Q", packed)


def rss_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def applied_s(make: Callable[[int], list[Any]], numbers: range, apply: Callable[[Any], object]) -> float:
    """Seconds to apply the events of these chains; making them is not counted."""
    seconds = 0.0
    for begin in range(0, len(numbers), CHAINS_AT_ONCE):
        events = [event for number in numbers[begin : begin + CHAINS_AT_ONCE] for event in make(number)]
        started = time.perf_counter()
        for event in events:
            apply(event)
        seconds += time.perf_counter() - started
    return seconds


def call_us(call: Callable[[Any], object], arguments: Iterator[Any]) -> dict[str, float]:
    """Microseconds of each call: percentiles."""
    clock, times = time.perf_counter_ns, []
    for argument in arguments:
        started = clock()
        call(argument)
        times.append(clock() - started)
    times.sort()
    return {f"p{percent}": times[len(times) * percent // 100] / 1000 for percent in PERCENTILES}
