"""The paged KV cache of the simulated engine: reference counts, prefix caching, least recently used eviction."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.contracts.kv_events import KvEvent, KvEventKind, block_hash64, pack_hashes

CONTENT_BYTES = 8


@dataclass(slots=True)
class _Change:
    """Consecutive changes of one kind, which become one event."""

    kind: KvEventKind
    hashes: list[bytes]
    parent: bytes | None = None


class BlockCache:
    """Blocks are numbered; a block is free (perhaps still cached) or held by one sequence or more.

    Only full blocks are named by a hash, and no hash names two blocks. A free block keeps its content and its name
    until it is handed out again, the one that has been free for longest first.
    """

    def __init__(self, blocks: int, *, prefix_caching: bool = True) -> None:
        self.blocks = blocks
        self.prefix_caching = prefix_caching
        """Without it no block is named, so none is found again."""
        self.contents = array("q", bytes(CONTENT_BYTES * (blocks + 1)))
        """The KV itself, by block (see ``tokens``), in memory that never moves; the last place is no block's."""
        self._holders = [0] * blocks
        self._names: list[bytes | None] = [None] * blocks
        self._named: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._changes: list[_Change] = []
        self.evicted_total = 0
        """Cached blocks that made room for new content."""

    @property
    def free(self) -> int:
        """Blocks without a holder."""
        return len(self._free)

    @property
    def named(self) -> int:
        """Blocks that are cached."""
        return len(self._named)

    def hashes(self) -> Iterable[bytes]:
        """The full hash of every cached block."""
        return self._named.keys()

    @property
    def address(self) -> int:
        """Of the first block's content."""
        return self.contents.buffer_info()[0]

    def block_of(self, name: bytes) -> int | None:
        """The block that is cached under this hash."""
        return self._named.get(name)

    def find(self, hashes: Sequence[bytes], limit: int) -> list[int]:
        """The blocks of the longest cached prefix of ``hashes``, at most ``limit``. Takes no hold of them."""
        found: list[int] = []
        for name in hashes[:limit]:
            block = self._named.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def room_beside(self, held: Iterable[int]) -> int:
        """Blocks that could be handed out after holding those in ``held``."""
        return len(self._free) - sum(not self._holders[block] for block in held)

    def hold(self, blocks: Iterable[int]) -> None:
        """One more sequence needs these."""
        for block in blocks:
            if not self._holders[block]:
                del self._free[block]
            self._holders[block] += 1

    def take(self, count: int) -> list[int] | None:
        """``count`` blocks for new content, held once; None, and nothing has changed, if there are too few."""
        if count > len(self._free):
            return None
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        block, _ = self._free.popitem(last=False)
        name = self._names[block]
        if name is not None:
            self._names[block] = None
            del self._named[name]
            self._tell_removed(name)
            self.evicted_total += 1
        self._holders[block] = 1
        return block

    def name(self, block: int, name: bytes, parent: bytes | None) -> None:
        """The held ``block`` is full: others may find it. A second block of the same hash stays nameless."""
        if name in self._named or not self.prefix_caching:
            return
        self._names[block] = name
        self._named[name] = block
        self._tell_stored(name, parent)

    def release(self, blocks: Sequence[int]) -> None:
        """One sequence fewer needs these. The end of a prefix is forgotten before its beginning."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            self._free[block] = None
            if self._names[block] is None:
                self._free.move_to_end(block, last=False)

    def take_events(self) -> list[KvEvent]:
        """Changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return [
            KvEvent(
                kind=change.kind,
                hashes=pack_hashes(map(block_hash64, change.hashes)),
                parent=None if change.parent is None else block_hash64(change.parent),
            )
            for change in changes
        ]

    def whole_as_events(self) -> list[KvEvent]:
        """Events that bring any reader to the present state."""
        stored = pack_hashes(map(block_hash64, self._named))
        return [KvEvent(kind=KvEventKind.CLEARED), KvEvent(kind=KvEventKind.STORED, hashes=stored)]

    def _tell_stored(self, name: bytes, parent: bytes | None) -> None:
        last = self._changes[-1] if self._changes else None
        if last and last.kind is KvEventKind.STORED and last.hashes[-1] == parent:
            last.hashes.append(name)
        else:
            self._changes.append(_Change(KvEventKind.STORED, [name], parent))

    def _tell_removed(self, name: bytes) -> None:
        last = self._changes[-1] if self._changes else None
        if last and last.kind is KvEventKind.REMOVED:
            last.hashes.append(name)
        else:
            self._changes.append(_Change(KvEventKind.REMOVED, [name]))
