"""The port of a store's memory: where copies of KV blocks lie, and which of them are kept.

Whoever has memory of another kind, or drops blocks in another order, implements this; the store worker does the rest:
it registers the memory with what moves KV, fetches blocks into it, grants leases to readers and ends them on time,
saves to files, and tells routers. See docs/stores.md, and ``services.worker.conformance`` for tests.

A block is named by its content: the engine's full hash of all tokens up to its end, and in models with several KV cache
groups the group's number. Equal names mean equal bytes. A worker calls from one thread; no call may block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from services.worker.engines.simulated.core.block_cache import Change

__all__ = ["Change", "MakeMemory", "StoreMemory"]


class StoreMemory(Protocol):
    """Blocks of one size, numbered from 0. A block is free, perhaps with content, or held, once or several times,
    whether or not it has a name.
    """

    blocks: int
    """How many there are."""
    evicted_total: int
    """Named blocks that were given to new content."""

    @property
    def address(self) -> int:
        """Where block 0 begins. Block n begins n times the size of a block later. The address never changes, and eight
        bytes after the last block belong to it, too.
        """

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""

    @property
    def named(self) -> int:
        """Blocks with a name."""

    def hashes(self) -> Iterable[bytes]:
        """All names."""

    def block_of(self, name: bytes) -> int | None:
        """Look up: the block of this name. None: there is none."""

    def hold(self, blocks: Iterable[int]) -> None:
        """Lease: until as many calls of ``release`` these blocks keep their bytes and their names."""

    def release(self, blocks: Sequence[int]) -> None:
        """Take one hold from each. They are in the order of a prompt, whose beginning is of more use than its end."""

    def take(self, count: int) -> list[int] | None:
        """Drop: blocks for new content, held once, which lose their names at once. None, without any change, if fewer
        than ``count`` are free.
        """

    def name(self, block: int, name: bytes, parent: bytes | None) -> None:
        """Insert: the content of this name has arrived in the held block. If another block has the name, this one stays
        without. ``parent``: the name of the block before it in its prompt.
        """

    def take_changes(self) -> list[Change]:
        """Which names came (STORED) and went (REMOVED) since the last call, in order. Routers learn of nothing else."""


MakeMemory = Callable[[int, int], StoreMemory]
"""Takes the number of blocks and the size of a block in bytes."""
