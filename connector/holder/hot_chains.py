"""Recently used prefixes of an engine: candidates to copy to other workers or to a store before they are evicted.

``note`` runs in the scheduler's thread when a request ends, so it only does one lookup per new block, up to a bound.
``hottest`` does the rest when the worker asks: it cuts each chain to the longest boundary that is still cached.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from connector.messages import Chain
from shared.contracts.kv_exchange import LEASE_BLOCKS_MAX, pack_full_hashes

CHAINS_MAX = 1024
BLOCKS_MAX = 262_144
"""Sum over all chains; their hashes then take 20 MB."""
LOOK_BACK_BLOCKS_MAX = 64
"""A chain is recognised as the continuation of an older one when it is at most so many blocks longer. A longer turn
leaves both; ``hottest`` then returns the longer one only.
"""
COOLING_S = 300.0
"""Half-life of a use."""


@dataclass(slots=True)
class UsedChain:
    hashes: list[bytes]
    uses: int
    heat: float
    """Uses, decayed to ``at_s``."""
    at_s: float

    def heat_at(self, now: float) -> float:
        """``heat`` decayed to ``now``."""
        return self.heat * 0.5 ** ((now - self.at_s) / COOLING_S)

    def begins(self, other: UsedChain) -> bool:
        """Whether this chain is a prefix of the other."""
        return len(self.hashes) <= len(other.hashes) and other.hashes[len(self.hashes) - 1] == self.hashes[-1]


class HotChains:
    """A bounded table of chains; drops the least recently used first."""

    def __init__(
        self, held: Callable[[list[bytes]], int], chains_max: int = CHAINS_MAX, blocks_max: int = BLOCKS_MAX
    ) -> None:
        """``held``: how many hashes of a chain precede the longest boundary in the cache."""
        self._held_of = held
        self._chains_max = chains_max
        self._blocks_max = blocks_max
        self._by_end: OrderedDict[bytes, UsedChain] = OrderedDict()
        self._blocks = 0

    def __len__(self) -> int:
        return len(self._by_end)

    @property
    def blocks(self) -> int:
        return self._blocks

    def note(self, hashes: list[bytes], now: float) -> None:
        """A request with these full blocks has ended. Keeps the list, which must not change afterwards."""
        if len(hashes) > LEASE_BLOCKS_MAX:
            hashes = hashes[:LEASE_BLOCKS_MAX]
        if not hashes:
            return
        earlier = self._pop_continued(hashes)
        used = UsedChain(hashes, 1, 1.0, now)
        if earlier is not None:
            used.uses += earlier.uses
            used.heat += earlier.heat_at(now)
        self._by_end[hashes[-1]] = used
        self._blocks += len(hashes)
        while len(self._by_end) > self._chains_max or self._blocks > self._blocks_max:
            _end, oldest = self._by_end.popitem(last=False)
            self._blocks -= len(oldest.hashes)

    def hottest(self, count: int, now: float, *, uses_min: int = 1, idle_s_max: float = math.inf) -> list[Chain]:
        """At most ``count`` chains, each cut to its cached part; none is a prefix of another."""
        chosen: list[UsedChain] = []
        for used in self._held(now, uses_min, idle_s_max):
            if any(used.begins(other) for other in chosen):
                continue
            shorter = next((place for place, other in enumerate(chosen) if other.begins(used)), None)
            if shorter is not None:
                chosen[shorter] = used
            elif len(chosen) < count:
                chosen.append(used)
            else:
                break
        return [Chain(hashes=pack_full_hashes(used.hashes), uses=used.uses) for used in chosen]

    def _pop_continued(self, hashes: list[bytes]) -> UsedChain | None:
        """Remove and return the longest known chain that is a prefix of these blocks."""
        for block in hashes[: -LOOK_BACK_BLOCKS_MAX - 1 : -1]:
            if (used := self._by_end.pop(block, None)) is not None:
                self._blocks -= len(used.hashes)
                return used
        return None

    def _held(self, now: float, uses_min: int, idle_s_max: float) -> Iterator[UsedChain]:
        """Hottest first, each cut to its cached part."""
        candidates = [used for used in self._by_end.values() if used.uses >= uses_min and now - used.at_s <= idle_s_max]
        for used in sorted(candidates, key=lambda used: used.heat_at(now), reverse=True):
            if held := self._held_of(used.hashes):
                yield UsedChain(used.hashes[:held], used.uses, used.heat, used.at_s)
