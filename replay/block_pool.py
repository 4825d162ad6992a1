"""The KV blocks of a simulated engine, by content instead of number; the rules of the worker's ``BlockCache``.

Only full blocks have names, and each name belongs to one block. A free block keeps its name until it is reused:
unnamed blocks first, then the least recently freed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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

    @property
    def blocks(self) -> int:
        """All of them."""
        return len(self.named) + self.nameless


class BlockPool:
    """All blocks of one engine."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.free_nameless = blocks
        self.free_named: OrderedDict[int, None] = OrderedDict()
        self.holders: dict[int, int] = {}
        """Reference count of each held named block."""
        self.changes: list[Change] = []

    @property
    def free(self) -> int:
        """Free blocks."""
        return self.free_nameless + len(self.free_named)

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

    def free_after_holding(self, names: Iterable[int]) -> int:
        """Blocks available after holding ``names``."""
        return self.free - sum(name in self.free_named for name in names)

    def hold(self, names: Iterable[int]) -> None:
        """Add a reference to each named block."""
        holders = self.holders
        for name in names:
            count = holders.get(name, 0)
            if not count:
                del self.free_named[name]
            holders[name] = count + 1

    def take(self, count: int) -> bool:
        """Take ``count`` blocks for new content; returns False and changes nothing when there are too few."""
        if count > self.free:
            return False
        plain = min(count, self.free_nameless)
        self.free_nameless -= plain
        if plain < count:
            evicted = [self.free_named.popitem(last=False)[0] for _ in range(count - plain)]
            tell(self.changes, KvEventKind.REMOVED, evicted)
        return True

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
        self.free_nameless += holding.nameless
        self.unhold(holding.named)
        holding.named, holding.nameless = [], 0

    def unhold(self, names: Sequence[int]) -> None:
        """Drop a reference of each named block."""
        holders = self.holders
        for name in reversed(names):
            if holders[name] == 1:
                del holders[name]
                self.free_named[name] = None
            else:
                holders[name] -= 1

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
