"""What this worker has told the routers that it holds: the mirror behind snapshots and digests."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import xor

from shared.contracts.kv_events import (
    KvDigest,
    KvEvent,
    KvEventKind,
    KvTier,
    digest_xor,
    pack_hashes,
    unpack_hashes,
)


class HeldBlocks:
    """The blocks held in each tier after the batch numbered ``seq``."""

    def __init__(self) -> None:
        self.seq = 0
        self._held: dict[KvTier, set[int]] = {tier: set() for tier in KvTier}
        self._xors = dict.fromkeys(KvTier, 0)

    def apply(self, events: Iterable[KvEvent]) -> int:
        """Take one batch in; answers its number."""
        for event in events:
            self._apply(event)
        self.seq += 1
        return self.seq

    def digest(self) -> KvDigest:
        """Now, in 16 bytes."""
        return KvDigest(seq=self.seq, count=sum(map(len, self._held.values())), xor=digest_xor(self._xors.values()))

    def packed(self, tier: KvTier = KvTier.DEVICE) -> bytes:
        """Every block held in ``tier``, packed as in ``pack_hashes``."""
        return pack_hashes(self._held[tier])

    def _apply(self, event: KvEvent) -> None:
        if event.kind is KvEventKind.CLEARED:
            for tier, held in self._held.items():
                held.clear()
                self._xors[tier] = 0
            return
        hashes, held = set(unpack_hashes(event.hashes)), self._held[event.tier]
        if event.kind is KvEventKind.STORED:
            changed = hashes - held
            held |= changed
        else:
            changed = hashes & held
            held -= changed
        self._xors[event.tier] = reduce(xor, changed, self._xors[event.tier])
