"""What this worker has told the routers that it holds: the mirror behind snapshots and digests."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import xor

from shared.contracts.kv_events import KvDigest, KvEvent, KvEventKind, pack_hashes, unpack_hashes


class HeldBlocks:
    """The set of blocks held after the batch numbered ``seq``."""

    def __init__(self) -> None:
        self.seq = 0
        self._held: set[int] = set()
        self._xor = 0

    def apply(self, events: Iterable[KvEvent]) -> int:
        """Take one batch in; answers its number."""
        for event in events:
            self._apply(event)
        self.seq += 1
        return self.seq

    def digest(self) -> KvDigest:
        """Now, in 16 bytes."""
        return KvDigest(seq=self.seq, count=len(self._held), xor=self._xor)

    def packed(self) -> bytes:
        """Every block held, packed as in ``pack_hashes``."""
        return pack_hashes(self._held)

    def _apply(self, event: KvEvent) -> None:
        if event.kind is KvEventKind.CLEARED:
            self._held.clear()
            self._xor = 0
            return
        hashes = set(unpack_hashes(event.hashes))
        if event.kind is KvEventKind.STORED:
            changed = hashes - self._held
            self._held |= changed
        else:
            changed = hashes & self._held
            self._held -= changed
        self._xor = reduce(xor, changed, self._xor)
