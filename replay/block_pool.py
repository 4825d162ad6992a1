"""The KV blocks of a simulated engine, by content instead of number; the rules of the worker's ``BlockCache``.

Only full blocks have names, and each name belongs to one block. A free block keeps its name until it is reused:
unnamed blocks first, then the least recently freed. What a model's other groups keep at the end of a full block, a
block for each group, comes and goes together: it has the complement of that block's name, which is negative.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from services.worker.engines.simulated.core.groups import OtherGroups
from shared.contracts.kv_events import KvEventKind, KvTier


@dataclass(slots=True)
class Change:
    """Consecutive changes of one kind, published as one event."""

    kind: KvEventKind
    names: list[int]
    parent: int | None = None
    tier: KvTier = KvTier.DEVICE


@dataclass(slots=True)
class Holding:
    """Blocks of one sequence: named ones in chain order, and the number of unnamed ones."""

    named: list[int] = field(default_factory=list)
    nameless: int = 0
    kept: list[int] = field(default_factory=list)
    """What it holds of the other groups: complements of names."""
    states: int = 0
    """Blocks with the states that it goes on writing."""

    @property
    def blocks(self) -> int:
        """All blocks of full attention."""
        return len(self.named) + self.nameless


class BlockPool:
    """All blocks of one engine."""

    def __init__(self, blocks: int, others: OtherGroups | None = None) -> None:
        """``others``: groups beside full attention."""
        self.blocks = blocks
        self.free_nameless = blocks
        self.free_named: OrderedDict[int, None] = OrderedDict()
        self._others = others
        self._kept_blocks = others.groups if others is not None else 1
        self._free_kept = 0
        """How many of ``free_named`` are of the other groups."""
        self.holders: dict[int, int] = {}
        """Reference count of each held named block."""
        self.changes: list[Change] = []

    @property
    def free(self) -> int:
        """Free blocks."""
        return self.free_nameless + len(self.free_named) + (self._kept_blocks - 1) * self._free_kept

    def has(self, name: int) -> bool:
        """Whether this block is cached."""
        return name in self.holders or name in self.free_named

    def depth(self, chain: Sequence[int], limit: int) -> int:
        """How many blocks of ``chain`` are cached, from its start, at most ``limit``."""
        holders, free = self.holders, self.free_named
        for index in range(min(limit, len(chain))):
            if chain[index] not in holders and chain[index] not in free:
                return index
        return min(limit, len(chain))

    def boundary(self, chain: Sequence[int], blocks: int) -> int:
        """The largest number of these blocks, at most ``blocks``, after which all groups have what a prompt needs."""
        others = self._others
        if others is not None:
            while blocks and not all(self.has(~chain[index]) for index in others.needed(blocks)):
                blocks -= 1
        return blocks

    def kept_at(self, chain: Sequence[int], boundary: int) -> list[int]:
        """What the other groups keep for a boundary after so many blocks."""
        return [] if self._others is None else [~chain[index] for index in self._others.needed(boundary)]

    def free_after_holding(self, names: Iterable[int]) -> int:
        """Blocks available after holding ``names``."""
        return self.free - sum(self._size(name) for name in names if name in self.free_named)

    def _size(self, name: int) -> int:
        return 1 if name >= 0 else self._kept_blocks

    def hold(self, names: Iterable[int]) -> None:
        """Add a reference to each named block."""
        holders = self.holders
        for name in names:
            count = holders.get(name, 0)
            if not count:
                del self.free_named[name]
                self._free_kept -= name < 0
            holders[name] = count + 1

    def take(self, count: int) -> bool:
        """Take ``count`` blocks for new content; returns False and changes nothing when there are too few."""
        if count > self.free:
            return False
        self.free_nameless -= count
        while self.free_nameless < 0:
            name = self.free_named.popitem(last=False)[0]
            self.free_nameless += self._size(name)
            if name < 0:
                self._free_kept -= 1
                tell(self.changes, KvEventKind.REMOVED, [~name], tier=KvTier.BOUNDARY)
            else:
                tell(self.changes, KvEventKind.REMOVED, [name])
        return True

    def keep(self, holding: Holding, name: int) -> None:
        """Hold what the other groups have at the end of the block of this name, while a prompt uses it: of a window the
        last blocks; of a state a copy, which it does not. Nothing is kept if too few blocks are free.
        """
        others = self._others
        assert others is not None
        if self.has(~name):
            self.hold([~name])
        elif self.take(others.groups):
            self.holders[~name] = 1
            tell(self.changes, KvEventKind.STORED, [name], tier=KvTier.BOUNDARY)
        else:
            return
        holding.kept.append(~name)
        self.drop_kept(holding)

    def drop_kept(self, holding: Holding) -> None:
        """Release what a prompt does not use any more of the other groups."""
        if self._others is not None:
            unused = len(holding.kept) - (0 if self._others.interval else self._others.window_blocks)
            self.unhold(holding.kept[: max(0, unused)])
            del holding.kept[: max(0, unused)]

    def name(self, holding: Holding, name: int, parent: int | None) -> None:
        """Name a held block that is full. A second block of the same content stays unnamed."""
        if name in self.holders or name in self.free_named:
            return
        holding.nameless -= 1
        holding.named.append(name)
        self.holders[name] = 1
        tell(self.changes, KvEventKind.STORED, [name], parent)

    def release(self, holding: Holding) -> None:
        """Release all blocks. The end of a prefix is evicted before its beginning."""
        self.free_nameless += holding.nameless + holding.states
        self.unhold(holding.kept)
        self.unhold(holding.named)
        holding.named, holding.nameless, holding.kept, holding.states = [], 0, [], 0

    def unhold(self, names: Sequence[int]) -> None:
        """Drop a reference of each named block."""
        holders = self.holders
        for name in reversed(names):
            if holders[name] == 1:
                del holders[name]
                self.free_named[name] = None
                self._free_kept += name < 0
            else:
                holders[name] -= 1

    def evicted_next(self, count: int) -> list[int]:
        """Names in the first ``count`` free blocks."""
        return list(islice(self.free_named, max(0, count - self.free_nameless)))

    def evict_first(self, names: Iterable[int]) -> None:
        """Those of these blocks that are free are evicted next, the last one first."""
        for name in names:
            if name in self.free_named:
                self.free_named.move_to_end(name, last=False)

    def take_changes(self) -> list[Change]:
        """Changes since the last call, in order."""
        changes = self.changes.copy()
        self.changes.clear()
        return changes


def tell(
    changes: list[Change], kind: KvEventKind, names: list[int], parent: int | None = None, tier: KvTier = KvTier.DEVICE
) -> None:
    """Append a change, to the last change if it goes on with it."""
    if changes:
        last = changes[-1]
        if last.kind is kind and last.tier is tier and (kind is KvEventKind.REMOVED or last.names[-1] == parent):
            last.names += names
            return
    changes.append(Change(kind, names, parent, tier))


class HostTier:
    """Blocks in a worker's host memory, as vLLM's offloading keeps them: each full block is copied there when it is
    computed, the least recently used one is evicted, and blocks that the engine's own cache lost are loaded before a
    prompt is computed behind them. A prompt that begins to be served uses all of its blocks here. Copying out takes no
    time: it has its own direction of the link.
    """

    def __init__(self, blocks: int, changes: list[Change]) -> None:
        self.blocks = blocks
        self.held: OrderedDict[int, None] = OrderedDict()
        self._changes = changes

    def depth(self, chain: Sequence[int], start: int, limit: int) -> int:
        """How far ``chain`` goes on here behind its first ``start`` blocks, at most to ``limit``."""
        end = min(limit, len(chain))
        while start < end and chain[start] in self.held:
            start += 1
        return start

    def use(self, chain: Sequence[int]) -> None:
        """A prompt has these blocks. Its end is evicted before its beginning."""
        for name in reversed(chain):
            if name in self.held:
                self.held.move_to_end(name)

    def store(self, name: int, parent: int | None) -> None:
        """Keep a block that is computed."""
        if name in self.held:
            self.held.move_to_end(name)
            return
        self.held[name] = None
        tell(self._changes, KvEventKind.STORED, [name], parent, KvTier.HOST)
        if len(self.held) > self.blocks:
            evicted, _none = self.held.popitem(last=False)
            tell(self._changes, KvEventKind.REMOVED, [evicted], None, KvTier.HOST)
