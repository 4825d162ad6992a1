"""The prefixes that an engine's requests used lately: what is worth having elsewhere before it is lost here.

Noting one costs a lookup for each block that it has more than the one it continues, up to a bound; everything else is
done when somebody asks. What is kept here may have left the cache meanwhile: that, too, is looked at then.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from connector.messages import Chain
from shared.contracts.kv_exchange import LEASE_BLOCKS_MAX, pack_full_hashes

CHAINS_MAX = 1024
BLOCKS_MAX = 262_144
"""In all chains, each counted for itself: their names take 20 MB then."""
LOOK_BACK_BLOCKS_MAX = 64
"""So far behind its end a chain is looked for that this one continues. A turn that is longer leaves a second chain,
which is left out when somebody asks."""
COOLING_S = 300.0
"""Uses count half after so long."""


@dataclass(slots=True)
class Used:
    """One chain."""

    hashes: list[bytes]
    uses: int
    heat: float
    """Uses, the older ones cooled down to ``at_s``."""
    at_s: float
    """The last of them."""

    def heat_at(self, now: float) -> float:
        """What is left of it."""
        return self.heat * 0.5 ** ((now - self.at_s) / COOLING_S)

    def begins(self, other: Used) -> bool:
        """Whether the other one has all of its blocks."""
        return len(self.hashes) <= len(other.hashes) and other.hashes[len(self.hashes) - 1] == self.hashes[-1]


class HotChains:
    """See the module. The least recently used are forgotten first."""

    def __init__(
        self, is_held: Callable[[bytes], bool], chains_max: int = CHAINS_MAX, blocks_max: int = BLOCKS_MAX
    ) -> None:
        self._is_held = is_held
        self._chains_max = chains_max
        self._blocks_max = blocks_max
        self._by_end: OrderedDict[bytes, Used] = OrderedDict()
        self._blocks = 0

    def __len__(self) -> int:
        return len(self._by_end)

    @property
    def blocks(self) -> int:
        """In all chains."""
        return self._blocks

    def note(self, hashes: list[bytes], now: float) -> None:
        """A request with these full blocks has ended; the list is kept, and must not change any more."""
        if len(hashes) > LEASE_BLOCKS_MAX:
            hashes = hashes[:LEASE_BLOCKS_MAX]
        if not hashes:
            return
        before = self._take_what_it_continues(hashes)
        used = Used(hashes, 1, 1.0, now)
        if before is not None:
            used.uses += before.uses
            used.heat += before.heat_at(now)
        self._by_end[hashes[-1]] = used
        self._blocks += len(hashes)
        while len(self._by_end) > self._chains_max or self._blocks > self._blocks_max:
            _end, oldest = self._by_end.popitem(last=False)
            self._blocks -= len(oldest.hashes)

    def hottest(self, count: int, now: float, *, uses_min: int = 1, idle_s_max: float = math.inf) -> list[Chain]:
        """So many at most, as far as they are held; none of them is the beginning of another one."""
        chosen: list[Used] = []
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
        return [Chain(hashes=pack_full_hashes(used.hashes), uses=used.uses, idle_s=now - used.at_s) for used in chosen]

    def _take_what_it_continues(self, hashes: list[bytes]) -> Used | None:
        """Out of the book: the longest chain that these blocks begin with, or are."""
        for block in hashes[: -LOOK_BACK_BLOCKS_MAX - 1 : -1]:
            if (used := self._by_end.pop(block, None)) is not None:
                self._blocks -= len(used.hashes)
                return used
        return None

    def _held(self, now: float, uses_min: int, idle_s_max: float) -> Iterator[Used]:
        """The hottest first, each cut to what is held of it: the end of a chain leaves a cache before its beginning."""
        asked = [used for used in self._by_end.values() if used.uses >= uses_min and now - used.at_s <= idle_s_max]
        for used in sorted(asked, key=lambda used: used.heat_at(now), reverse=True):
            held = bisect_left(used.hashes, True, key=lambda block: not self._is_held(block))
            if held:
                yield Used(used.hashes[:held], used.uses, used.heat, used.at_s)
