"""A store of somebody else: uses the port of a store's memory and nothing else of Baton. Its memory is a bytearray, it
drops what was looked up least, and it remembers everything in dicts. The others after it have one fault each.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Sequence

from services.worker.engines.store.engine import store_with
from services.worker.engines.store.port import Change
from shared.contracts.kv_events import KvEventKind

PROBED_BYTES = 8
HANGS_S = 3600.0


class OtherMemory:
    """A ``StoreMemory``."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self.blocks = blocks
        self.evicted_total = 0
        self._bytes = bytearray(blocks * block_bytes + PROBED_BYTES)
        self._places: dict[bytes, int] = {}
        self._contents: dict[int, bytes] = {}
        self._holds = dict.fromkeys(range(blocks), 0)
        self._looks = dict.fromkeys(range(blocks), 0)
        self._changes: list[Change] = []

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))

    @property
    def free(self) -> int:
        return sum(not holds for holds in self._holds.values())

    @property
    def named(self) -> int:
        return len(self._places)

    def hashes(self) -> Iterable[bytes]:
        return list(self._places)

    def block_of(self, name: bytes) -> int | None:
        block = self._places.get(name)
        if block is not None:
            self._looks[block] += 1
        return block

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._holds[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._holds[block] -= 1

    def droppable(self) -> list[int]:
        """Blocks that may get new content."""
        return [block for block, holds in self._holds.items() if not holds]

    def take(self, count: int) -> list[int] | None:
        free = sorted(self.droppable(), key=lambda block: (block in self._contents, self._looks[block]))[:count]
        if len(free) < count:
            return None
        gone = [self._contents.pop(block) for block in free if block in self._contents]
        for name in gone:
            del self._places[name]
        self.evicted_total += len(gone)
        if gone:
            self._changes.append(Change(KvEventKind.REMOVED, gone))
        for block in free:
            self._holds[block] += 1
            self._looks[block] = 0
        return free

    def name(self, block: int, name: bytes, parent: bytes | None) -> None:
        if name not in self._places:
            self._places[name] = block
            self._contents[block] = name
            self._changes.append(Change(KvEventKind.STORED, [name], parent))

    def take_changes(self) -> list[Change]:
        changes, self._changes = self._changes, []
        return changes


class Dropping(OtherMemory):
    """Drops what is leased, too, in the order of its blocks."""

    def block_of(self, name: bytes) -> int | None:
        return self._places.get(name)

    def hold(self, blocks: Iterable[int]) -> None:
        """Keeps nothing."""

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._holds[block] = 0


class Swapping(OtherMemory):
    """Finds the next block instead of the right one."""

    def block_of(self, name: bytes) -> int | None:
        block = super().block_of(name)
        return None if block is None else (block + 1) % self.blocks


class Hiding(OtherMemory):
    """Tells nobody what it dropped."""

    def take_changes(self) -> list[Change]:
        return [change for change in super().take_changes() if change.kind is KvEventKind.STORED]


class Hanging(OtherMemory):
    """Never answers when something is looked up that it has."""

    def hold(self, blocks: Iterable[int]) -> None:
        if list(blocks):
            time.sleep(HANGS_S)


start = store_with(OtherMemory)
start_dropping, start_swapping = store_with(Dropping), store_with(Swapping)
start_hiding, start_hanging = store_with(Hiding), store_with(Hanging)
