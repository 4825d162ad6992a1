"""What came of prefetched blocks: a later request finds them, or they are evicted before, or none asks for too long."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

RUNS_MAX = 256
"""Prefetches whose blocks are watched; those of the oldest count as wasted beyond that."""
UNUSED_S_MAX = 600.0
"""A block that no request has found for so long was prefetched in vain, even if one finds it later."""
SWEEP_S = 1.0
"""Shortest time between two looks at what is still cached."""


@dataclass(slots=True)
class Run:
    """The blocks of one prefetch that no request has found yet, by index in its hashes."""

    hashes: Sequence[bytes]
    first: int
    end: int
    until_s: float

    def shared(self, hashes: Sequence[bytes]) -> int:
        """How many hashes of the run's prompt these begin with, if that is more than ``first``; else ``first``."""
        low, high = self.first, min(self.end, len(hashes))
        while low < high:
            middle = (low + high + 1) // 2
            if self.hashes[middle - 1] == hashes[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low


class PrefetchedBlocks:
    """Counts blocks, in hashes of prompts. Used on the scheduler's thread."""

    def __init__(self) -> None:
        self.fetched = 0
        self.used = 0
        self.wasted = 0
        self._runs: list[Run] = []
        self._swept_at = -math.inf

    @property
    def unused(self) -> int:
        """Blocks of which nothing has come yet."""
        return self.fetched - self.used - self.wasted

    def add(self, hashes: Sequence[bytes], first: int, end: int, now: float) -> None:
        """A prefetch has brought the blocks from ``first`` to before ``end`` of a prompt with these hashes."""
        if end <= first:
            return
        self.fetched += end - first
        self._runs.append(Run(hashes, first, end, now + UNUSED_S_MAX))
        if len(self._runs) > RUNS_MAX:
            self._drop(self._runs.pop(0))

    def found(self, hashes: Sequence[bytes], count: int) -> None:
        """A request has found the first ``count`` blocks of its prompt in the cache."""
        for run in list(self._runs):
            used = min(count, run.shared(hashes))
            if used > run.first:
                self.used += used - run.first
                run.first = used
                if run.first >= run.end:
                    self._runs.remove(run)

    def sweep(self, held: Callable[[Sequence[bytes]], int], now: float) -> None:
        """Look which blocks are cached still. ``held``: how many of a prompt's hashes are, from the first on."""
        if not self._runs or now < self._swept_at + SWEEP_S:
            return
        self._swept_at = now
        for run in list(self._runs):
            left = max(run.first, min(run.end, held(run.hashes)))
            self.wasted += run.end - left
            run.end = left
            if left <= run.first or now >= run.until_s:
                self._runs.remove(run)
                self._drop(run)

    def _drop(self, run: Run) -> None:
        self.wasted += run.end - run.first


class OtherFetch(Protocol):
    """A fetch without a request, as the reader sees it."""

    def brings(self, hashes: Sequence[bytes], start: int) -> bool:
        """Whether it may bring what a prompt with these hashes lacks from the position ``start`` on."""


@dataclass(frozen=True, slots=True)
class WithoutRequest:
    """What fetches without a request mean for requests, which wait for those under way."""

    under_way: Sequence[OtherFetch] = ()
    blocks: PrefetchedBlocks = field(default_factory=PrefetchedBlocks)
