"""The simulated engine's paged KV cache, with reference counts, prefix caching and LRU eviction, and its adapters to
the connector's interfaces: for leases, and for fetched blocks.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from connector.groups import Blocks
from connector.holder.boundaries import Part
from connector.reader.prefetch import FREE_SHARE_MIN, HELD_SHARE_MAX, Held
from services.worker.engines.simulated.core.groups import OtherGroups
from services.worker.engines.simulated.core.tokens import kept_content
from shared.contracts.kv_events import KvEvent, KvEventKind, KvTier, block_hash64, pack_hashes

CONTENT_BYTES = 8


@dataclass(slots=True)
class Change:
    """Consecutive changes of one kind, which become one event."""

    kind: KvEventKind
    hashes: list[bytes]
    parent: bytes | None = None
    tier: KvTier = KvTier.DEVICE


class BlockCache:
    """Blocks are numbered. A block is free (perhaps still cached) or held by one sequence or more.

    Only full blocks have a name, their hash, and no two blocks have the same name. A free block keeps its content and
    its name until it is allocated again. The block that has been free for longest is allocated first.
    """

    def __init__(self, blocks: int, *, prefix_caching: bool = True, others: OtherGroups | None = None) -> None:
        """``others``: groups beside full attention."""
        self.blocks = blocks
        self.prefix_caching = prefix_caching
        self.others = others
        self.contents = array("q", bytes(CONTENT_BYTES * (blocks + 1)))
        """The content of each block (see ``tokens``), in memory that never moves. The last element is for probes."""
        self._holders = [0] * blocks
        self._names: list[bytes | None] = [None] * blocks
        self._named: dict[bytes, int] = {}
        self._kept: dict[bytes, list[int]] = {}
        """Blocks of the other groups by the name of the full block with which they end."""
        self._keeps: dict[int, bytes] = {}
        """The keys of ``_kept`` by block."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._changes: list[Change] = []
        self.evicted_total = 0
        """Cached blocks evicted for new content."""

    @property
    def free(self) -> int:
        """Blocks without a holder."""
        return len(self._free)

    @property
    def named(self) -> int:
        return len(self._named)

    @property
    def boundaries(self) -> int:
        """Full blocks at whose ends the other groups keep something."""
        return len(self._kept)

    def hashes(self) -> Iterable[bytes]:
        return self._named.keys()

    @property
    def address(self) -> int:
        return self.contents.buffer_info()[0]

    def block_of(self, name: bytes) -> int | None:
        return self._named.get(name)

    def block_in(self, group: int, name: bytes) -> int | None:
        """The block of a group that is cached under this name; group 0 is that of full attention."""
        if not group:
            return self._named.get(name)
        kept = self._kept.get(name)
        return None if kept is None else kept[group - 1]

    def find(self, hashes: Sequence[bytes], limit: int) -> list[int]:
        """The blocks of the longest cached prefix of ``hashes``, at most ``limit``. Does not hold them."""
        found: list[int] = []
        for name in hashes[:limit]:
            block = self._named.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def boundary(self, hashes: Sequence[bytes], blocks: int) -> int:
        """The largest number of these blocks, at most ``blocks``, after which all groups have what a prompt needs."""
        others = self.others
        if others is None:
            return blocks
        while blocks and any(hashes[index] not in self._kept for index in others.needed(blocks)):
            blocks -= 1
        return blocks

    def kept_at(self, hashes: Sequence[bytes], boundary: int) -> list[list[int]]:
        """What the other groups keep for a boundary after so many blocks, by the block with which it ends."""
        needed = () if self.others is None else self.others.needed(boundary)
        return [self._kept[hashes[index]] for index in needed]

    def keep(self, name: bytes, full: int) -> list[int] | None:
        """Hold what the other groups keep at the end of the block ``full`` of this name: a block each, perhaps those of
        an earlier sequence. None if too few are free.
        """
        assert self.others is not None
        kept = self.kept(name)
        if kept is not None:
            self.hold(kept)
            return kept
        kept = self.take(self.others.groups)
        if kept is not None:
            for group, block in enumerate(kept, 1):
                self.contents[block] = kept_content(self.contents[full], group)
            self.name_kept(name, kept)
        return kept

    def name_kept(self, name: bytes, kept: list[int]) -> None:
        """Name held blocks of the other groups by the block with which they end. Others of one name stay nameless."""
        if name in self._kept or not self.prefix_caching:
            return
        self._kept[name] = kept
        self._keeps.update(dict.fromkeys(kept, name))
        self._tell(KvEventKind.STORED, name, None, KvTier.BOUNDARY)

    def wrong(self, full: int, kept: Sequence[int]) -> int:
        """Differs from 0 if the other groups keep anything else than what belongs to the end of the block ``full``."""
        content, wrong = self.contents[full], 0
        for group, block in enumerate(kept, 1):
            wrong ^= self.contents[block] ^ kept_content(content, group)
        return wrong

    def kept(self, name: bytes) -> list[int] | None:
        """The blocks of the other groups that end with the block of this name."""
        return self._kept.get(name)

    def names_of_free(self, count: int) -> set[bytes]:
        """The names in the blocks that are allocated next, of all groups."""
        names = map(self.name_of, islice(self._free, count))
        return {name for name in names if name is not None}

    def name_of(self, block: int) -> bytes | None:
        """The name of what it keeps, in any group."""
        return self._names[block] or self._keeps.get(block)

    def free_first(self, blocks: Sequence[int]) -> None:
        """Those of these blocks that are free are allocated next, the last one first."""
        for block in blocks:
            if block in self._free:
                self._free.move_to_end(block, last=False)

    def free_after_holding(self, held: Iterable[int]) -> int:
        """Blocks that would be free after holding those in ``held``."""
        return len(self._free) - sum(not self._holders[block] for block in held)

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if not self._holders[block]:
                del self._free[block]
            self._holders[block] += 1

    def take(self, count: int) -> list[int] | None:
        """``count`` blocks for new content, held once; None without any change if too few are free."""
        if count > len(self._free):
            return None
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        block, _ = self._free.popitem(last=False)
        name = self._names[block]
        if name is not None:
            self._names[block] = None
            del self._named[name]
            self._tell(KvEventKind.REMOVED, name, None, KvTier.DEVICE)
            self.evicted_total += 1
        elif block in self._keeps:
            name = self._keeps[block]
            for each in self._kept.pop(name):
                del self._keeps[each]
            self._tell(KvEventKind.REMOVED, name, None, KvTier.BOUNDARY)
            self.evicted_total += 1
        self._holders[block] = 1
        return block

    def name(self, block: int, name: bytes, parent: bytes | None) -> None:
        """Name a held, full block, so that others can find it. A second block of the same hash stays nameless."""
        if name in self._named or not self.prefix_caching:
            return
        self._names[block] = name
        self._named[name] = block
        self._tell(KvEventKind.STORED, name, parent, KvTier.DEVICE)

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one hold from each block. The end of a prefix is evicted before its beginning."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            self._free[block] = None
            if self._names[block] is None and block not in self._keeps:
                self._free.move_to_end(block, last=False)

    def take_changes(self) -> list[Change]:
        """Changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def take_events(self) -> list[KvEvent]:
        """As ``take_changes``, as events."""
        return [
            KvEvent(
                kind=change.kind,
                hashes=pack_hashes(map(block_hash64, change.hashes)),
                tier=change.tier,
                parent=None if change.parent is None else block_hash64(change.parent),
            )
            for change in self.take_changes()
        ]

    def whole_as_events(self) -> list[KvEvent]:
        """Events that bring any reader to the present state."""
        held = ((KvTier.DEVICE, self._named), (KvTier.BOUNDARY, self._kept))
        stored = [(tier, pack_hashes(map(block_hash64, names))) for tier, names in held if names]
        return [
            KvEvent(kind=KvEventKind.CLEARED),
            *(KvEvent(kind=KvEventKind.STORED, hashes=hashes, tier=tier) for tier, hashes in stored),
        ]

    def _tell(self, kind: KvEventKind, name: bytes, parent: bytes | None, tier: KvTier) -> None:
        last = self._changes[-1] if self._changes else None
        is_next = last is not None and (last.kind, last.tier) == (kind, tier)
        if last is not None and is_next and (kind is KvEventKind.REMOVED or last.hashes[-1] == parent):
            last.hashes.append(name)
        else:
            self._changes.append(Change(kind, [name], parent, tier))


@dataclass(frozen=True, slots=True)
class NumberedBlock:
    """A block of vLLM's pool, reduced to its number."""

    block_id: int
    ref_cnt: int = 0
    """Holds of requests that may write into it while it has a name. There are none."""


class LeasablePool:
    """A ``connector.holder.holder.Pool``. A block gets its name when the step that fills it has ended."""

    def __init__(self, cache: BlockCache) -> None:
        self.blocks: Sequence[NumberedBlock] = [NumberedBlock(number) for number in range(cache.blocks)]
        self.enable_caching = cache.prefix_caching
        self._cache = cache

    def get_cached_block(self, block_hash: bytes, groups: list[int]) -> list[NumberedBlock] | None:
        """The blocks of these groups that are cached under this hash, or None if one is not."""
        found: list[NumberedBlock] = []
        for group in groups:
            if (block := self._cache.block_in(group, block_hash)) is None:
                return None
            found.append(self.blocks[block])
        return found

    def find_boundary(self, hashes: list[bytes], tokens_max: int, *, block_size: int) -> tuple[list[Part], int]:
        """See ``connector.holder.boundaries.FindBoundary``."""
        cache = self._cache
        found = cache.find(hashes, tokens_max // block_size)
        boundary = cache.boundary(hashes, len(found))
        kept = cache.kept_at(hashes, boundary)
        first = [0, *[boundary - len(kept)] * (len(kept[0]) if kept else 0)]
        blocks = [found[:boundary], *zip(*kept, strict=True)]
        parts = [Part(at, [self.blocks[block] for block in of]) for at, of in zip(first, blocks, strict=True)]
        return parts, boundary * block_size

    def touch(self, blocks: Sequence[NumberedBlock]) -> None:
        self._cache.hold([block.block_id for block in blocks])

    def free_blocks(self, ordered_blocks: Iterable[NumberedBlock]) -> None:
        """Remove one hold from each block; the first block is evicted first."""
        ordered = [block.block_id for block in ordered_blocks]
        self._cache.release(ordered[::-1])


class CacheBlockAllocator:
    """See ``connector.reader.prefetch.BlockAllocator``."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._arrived: dict[bytes, list[int]] = {}
        """Blocks of other groups that came with one prompt, by the name that they get with the last group's."""

    @property
    def blocks(self) -> int:
        """Blocks of the engine."""
        return int(self._cache.blocks)

    @property
    def fetch_blocks_max(self) -> int:
        """Blocks that all fetches together may pin."""
        return int(self._cache.blocks * HELD_SHARE_MAX)

    def hold(self, hashes: Sequence[bytes]) -> Held:
        """Hold the longest cached prefix of these."""
        found = self._cache.find(hashes, len(hashes))
        boundary = self._cache.boundary(hashes, len(found))
        held = [*found, *chain.from_iterable(self._cache.kept_at(hashes, boundary))]
        self._cache.hold(held)
        return Held(len(found), boundary, held)

    def allocate(self, count: int) -> list[int]:
        """At most ``count`` blocks for new content. ``FREE_SHARE_MIN`` of all blocks stays free for requests."""
        spare = self._cache.free - int(self._cache.blocks * FREE_SHARE_MIN)
        return self._cache.take(max(0, min(count, spare))) or []

    def cache(self, hashes: Sequence[bytes], blocks: Blocks, _boundary: int) -> None:
        """Put them into the prefix cache. Groups come in order, with equally many blocks of each but full attention."""
        for index, block in enumerate(blocks.ids, start=blocks.first):
            if blocks.group:
                self._cache_kept(hashes[index], blocks.group, block)
            else:
                self._cache.name(block, hashes[index], hashes[index - 1] if index else None)

    def _cache_kept(self, name: bytes, group: int, block: int) -> None:
        others = self._cache.others
        assert others is not None
        arrived = [block] if group == 1 else [*self._arrived.pop(name), block]
        if group == others.groups:
            self._cache.name_kept(name, arrived)
        else:
            self._arrived[name] = arrived

    def free(self, blocks: Sequence[int]) -> None:
        self._cache.release(blocks)

    def evicted_next(self, count: int) -> set[bytes]:
        """The names in the first ``count`` free blocks."""
        return self._cache.names_of_free(count)

    def evict_first(self, blocks: Sequence[int], names: set[bytes]) -> None:
        """The last of these comes first."""
        self._cache.free_first([block for block in blocks if self._cache.name_of(block) in names])
