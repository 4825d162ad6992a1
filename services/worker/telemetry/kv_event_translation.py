"""From the engine's KV events to the wire's.

An engine may hold several copies of one block: it stores each copy and removes each copy. On the wire a block is held
or not, so a removal counts only when it takes the last copy.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.contracts.kv_events import KvEvent, KvEventKind, KvTier, block_hash64, pack_hashes


class EventTranslation:
    """Counts the copies of each block that the engine holds in each tier."""

    def __init__(self) -> None:
        self._copies: dict[KvTier, dict[int, int]] = {tier: {} for tier in KvTier}

    def stored(self, hashes: Iterable[bytes], parent: bytes | None, tier: KvTier = KvTier.DEVICE) -> KvEvent | None:
        """Full hashes of a run of blocks, and of the block before it."""
        short = [block_hash64(full) for full in hashes]
        copies = self._copies[tier]
        for block in short:
            copies[block] = copies.get(block, 0) + 1
        if not short:
            return None
        return KvEvent(
            kind=KvEventKind.STORED,
            hashes=pack_hashes(short),
            tier=tier,
            parent=None if parent is None else block_hash64(parent),
        )

    def removed(self, hashes: Iterable[bytes], tier: KvTier = KvTier.DEVICE) -> KvEvent | None:
        """One copy of each of these blocks is gone from this tier."""
        copies = self._copies[tier]
        gone = [block for block in map(block_hash64, hashes) if _drop(copies, block)]
        return KvEvent(kind=KvEventKind.REMOVED, hashes=pack_hashes(gone), tier=tier) if gone else None

    def cleared(self) -> KvEvent:
        """Everything is gone from every tier, or nothing certain is known any more."""
        for copies in self._copies.values():
            copies.clear()
        return KvEvent(kind=KvEventKind.CLEARED)


def _drop(copies: dict[int, int], block: int) -> bool:
    """Whether that was the last copy."""
    count = copies.get(block, 0)
    if count > 1:
        copies[block] = count - 1
        return False
    return copies.pop(block, None) is not None
