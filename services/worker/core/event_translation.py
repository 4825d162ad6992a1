"""From the engine's KV events to the wire's.

An engine may hold several copies of one block: it stores each copy and removes each copy. On the wire a block is held
or not, so a removal counts only when it takes the last copy.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.contracts.kv_events import KvEvent, KvEventKind, block_hash64, pack_hashes


class EventTranslation:
    """Counts the copies of each block that the engine holds."""

    def __init__(self) -> None:
        self._copies: dict[int, int] = {}

    def stored(self, hashes: Iterable[bytes], parent: bytes | None) -> KvEvent | None:
        """Full hashes of a run of blocks, and of the block before it."""
        short = [block_hash64(full) for full in hashes]
        for block in short:
            self._copies[block] = self._copies.get(block, 0) + 1
        if not short:
            return None
        return KvEvent(
            kind=KvEventKind.STORED,
            hashes=pack_hashes(short),
            parent=None if parent is None else block_hash64(parent),
        )

    def removed(self, hashes: Iterable[bytes]) -> KvEvent | None:
        """One copy of each of these blocks is gone."""
        gone = [block for block in map(block_hash64, hashes) if self._drop(block)]
        return KvEvent(kind=KvEventKind.REMOVED, hashes=pack_hashes(gone)) if gone else None

    def cleared(self) -> KvEvent:
        """Everything is gone, or nothing certain is known any more."""
        self._copies.clear()
        return KvEvent(kind=KvEventKind.CLEARED)

    def _drop(self, block: int) -> bool:
        """Whether that was the last copy."""
        copies = self._copies.get(block, 0)
        if copies > 1:
            self._copies[block] = copies - 1
            return False
        return self._copies.pop(block, None) is not None
