"""Recently used prefixes of an engine: candidates to copy to other workers or to a store before they are evicted.

``note`` runs in the scheduler's thread when a request ends, so it only does one lookup per new block, up to a bound.
``hottest`` and ``for_store`` do the rest when the worker asks: they cut each chain to the longest boundary that is
still cached.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, takewhile

from connector.messages import Chain
from shared.contracts.kv_exchange import LEASE_BLOCKS_MAX, pack_full_hashes

CHAINS_MAX = 16_384
BLOCKS_MAX = 262_144
"""Sum over all chains; their hashes then take 20 MB."""
LOOK_BACK_BLOCKS_MAX = 64
"""A chain is recognised as the continuation of an older one when it is at most so many blocks longer. A longer turn
leaves both; ``hottest`` then returns the longer one only.
"""
COOLING_S = 300.0
"""Half-life of a use."""
EVICTION_SHARE = 0.25
"""Share of an engine's blocks that are about to be evicted: what they hold is offered to a store."""
EVICTION_BLOCKS_MAX = 4096
"""Maximum number of these blocks. An engine that fills 1,000 blocks a second reaches the last one after four."""
NOT_EVICTED_MAX = 64
"""Chains that are looked at beyond those that are about to be evicted. Engines evict chains nearly in the order of
their use."""


@dataclass(slots=True)
class UsedChain:
    hashes: list[bytes]
    uses: int
    heat: float
    """Uses, decayed to ``at_s``."""
    at_s: float
    end: bytes
    """The last hash of the chain before it was cut to its cached part."""

    def heat_at(self, now: float) -> float:
        """``heat`` decayed to ``now``."""
        return self.heat * 0.5 ** ((now - self.at_s) / COOLING_S)

    def begins(self, other: UsedChain) -> bool:
        """Whether this chain is a prefix of the other."""
        return len(self.hashes) <= len(other.hashes) and other.hashes[len(self.hashes) - 1] == self.hashes[-1]


class HotChains:
    """A bounded table of chains; drops the least recently used first."""

    def __init__(
        self,
        held: Callable[[list[bytes]], int],
        chains_max: int = CHAINS_MAX,
        blocks_max: int = BLOCKS_MAX,
        *,
        keeps_prefix: bool = True,
        look_back_blocks: int = LOOK_BACK_BLOCKS_MAX,
    ) -> None:
        """``held``: how many hashes of a chain precede the longest boundary in the cache. ``keeps_prefix``: see
        ``GroupPlan``. ``look_back_blocks``: see ``LOOK_BACK_BLOCKS_MAX``.
        """
        self._held_of = held
        self._keeps_prefix = keeps_prefix
        self._look_back_blocks = look_back_blocks
        self._chains_max = chains_max
        self._blocks_max = blocks_max
        self._by_end: OrderedDict[bytes, UsedChain] = OrderedDict()
        """The least recently used first."""
        self._unoffered: OrderedDict[bytes, UsedChain] = OrderedDict()
        """Chains that ``for_store`` has not returned since their last use."""
        self.leaving: set[bytes] = set()
        """Hashes of the chains that ``for_store`` returned last because they are evicted next."""
        self._blocks_min = 1
        self._lost = 0
        """Blocks that left the cache or the table without having been returned by ``for_store``."""
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
        used = UsedChain(hashes, 1, 1.0, now, hashes[-1])
        if earlier is not None:
            used.uses += earlier.uses
            used.heat += earlier.heat_at(now)
        self._by_end[used.end] = self._unoffered[used.end] = used
        self._blocks += len(hashes)
        while len(self._by_end) > self._chains_max or self._blocks > self._blocks_max:
            _end, oldest = self._by_end.popitem(last=False)
            self._blocks -= len(oldest.hashes)
            if self._unoffered.pop(oldest.end, None) is not None and len(oldest.hashes) >= self._blocks_min:
                self._lost += len(oldest.hashes)

    def hottest(self, count: int, now: float, *, uses_min: int = 1, idle_s_max: float = math.inf) -> list[Chain]:
        """At most ``count`` chains, each cut to its cached part; none is a prefix of another."""
        return [_told(used) for used in self._distinct(count, self._held(now, uses_min, idle_s_max))]

    def for_store(
        self,
        count: int,
        now: float,
        *,
        uses_min: int,
        idle_s_max: float,
        evicted_next: Callable[[], set[bytes]],
        blocks_min: int = 1,
    ) -> list[Chain]:
        """As ``hottest``, and before them chains that have not been returned since their last use and of which the
        engine evicts blocks next, however little used. With an infinite ``idle_s_max``, also those returned before.

        ``evicted_next`` returns the names of the blocks that the engine evicts next, of all KV cache groups.
        ``blocks_min``: of chains that are returned because of them.
        """
        self._blocks_min = blocks_min
        if math.isinf(idle_s_max):
            self._unoffered = self._by_end.copy()
        evicting = self._evicting(evicted_next(), count) if self._unoffered else []
        if math.isinf(idle_s_max):
            self._lost = 0  # Before this store there was none.
        ends = {used.end for used in evicting}
        chosen = self._distinct(count, chain(evicting, self._held(now, uses_min, idle_s_max)))
        for end in ends.union(used.end for used in chosen):
            self._unoffered.pop(end, None)
        self.leaving = {block for used in chosen if used.end in ends for block in used.hashes}
        return [_told(used, is_evicting=used.end in ends) for used in chosen]

    def take_lost(self) -> int:
        """Blocks of chains that were gone before ``for_store`` could return them, since the last call."""
        lost, self._lost = self._lost, 0
        return lost

    def _evicting(self, evicted_next: set[bytes], count: int) -> list[UsedChain]:
        """At most ``count`` chains, the least recently used first. Their ends, which go first, are evicted or next."""
        found: list[UsedChain] = []
        others = 0
        for used in list(self._unoffered.values()):
            if len(found) >= count or others >= NOT_EVICTED_MAX:
                break
            held, blocks = self._held_of(used.hashes), len(used.hashes)
            if blocks < self._blocks_min:
                del self._unoffered[used.end]
                continue
            if not held or (self._keeps_prefix and held < blocks):
                self._lost += blocks - held
                del self._unoffered[used.end]
            elif evicted_next.isdisjoint(used.hashes[max(0, held - self._look_back_blocks) : held]):
                others += 1
                continue
            if held:
                found.append(UsedChain(used.hashes[:held], used.uses, used.heat, used.at_s, used.end))
        return found

    def _distinct(self, count: int, candidates: Iterable[UsedChain]) -> list[UsedChain]:
        """The first ``count`` of which none is a prefix of another."""
        chosen: list[UsedChain] = []
        for used in candidates:
            if any(used.begins(other) for other in chosen):
                continue
            shorter = next((place for place, other in enumerate(chosen) if other.begins(used)), None)
            if shorter is not None:
                chosen[shorter] = used
            elif len(chosen) < count:
                chosen.append(used)
            else:
                break
        return chosen

    def _pop_continued(self, hashes: list[bytes]) -> UsedChain | None:
        """Remove and return the longest known chain that is a prefix of these blocks."""
        for block in hashes[: -self._look_back_blocks - 1 : -1]:
            if (used := self._by_end.pop(block, None)) is not None:
                self._blocks -= len(used.hashes)
                self._unoffered.pop(block, None)
                return used
        return None

    def _held(self, now: float, uses_min: int, idle_s_max: float) -> Iterator[UsedChain]:
        """Hottest first, each cut to its cached part."""
        recent = takewhile(lambda used: now - used.at_s <= idle_s_max, reversed(self._by_end.values()))
        candidates = [used for used in recent if used.uses >= uses_min]
        for used in sorted(candidates, key=lambda used: used.heat_at(now), reverse=True):
            if held := self._held_of(used.hashes):
                yield UsedChain(used.hashes[:held], used.uses, used.heat, used.at_s, used.end)


def _told(used: UsedChain, *, is_evicting: bool = False) -> Chain:
    return Chain(hashes=pack_full_hashes(used.hashes), uses=used.uses, is_evicting=is_evicting)
