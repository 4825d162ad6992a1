"""Who of the staying workers gets which prefix of one that leaves: little is moved, nobody loses much of its own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shared.contracts.ids import WorkerId
from shared.contracts.workers import Role, WorkerPhase, WorkerRecord

TAKEN_SHARE_MAX = 0.5
"""Of an engine's blocks, that one other worker's prefixes may fill: it has hot prefixes of its own."""
STORE = 2
"""The rank of stores."""


@dataclass(slots=True)
class CopyTarget:
    """A worker that may take some."""

    worker_id: WorkerId
    rank: int
    """Smaller ones are asked first, whatever it costs."""
    blocks: int
    """Of its memory: all of a store's are for such prefixes."""
    taken: int = 0
    holds: set[bytes] = field(default_factory=set)
    """Blocks of ours that it is known to have."""

    def misses(self, chain: Sequence[bytes]) -> int:
        """How many blocks of the chain it is not known to have: it is known to have whole beginnings only."""
        return len(chain) - bisect_left(chain, True, key=lambda block: block not in self.holds)


class CopyTargets:
    """Gives each chain to whoever then has the smallest share of its memory filled with such gifts."""

    def __init__(self, copy_targets: Iterable[CopyTarget]) -> None:
        known = sorted(copy_targets, key=lambda taker: taker.worker_id)
        self._takers = {taker.worker_id: taker for taker in known if taker.blocks > 0}

    def __bool__(self) -> bool:
        return bool(self._takers)

    def best(self, chain: Sequence[bytes]) -> list[WorkerId]:
        """Who could take the chain, the best first."""
        ranked = []
        lot = int.from_bytes(chain[-1][-4:])  # Among equals: the same for every worker that has this chain to give.
        for place, taker in enumerate(self._takers.values()):
            share = (taker.taken + taker.misses(chain)) / taker.blocks
            if share <= (1.0 if taker.rank == STORE else TAKEN_SHARE_MAX):
                ranked.append((taker.rank, share, (place + lot) % len(self._takers), taker.worker_id))
        return [worker_id for *_reasons, worker_id in sorted(ranked)]

    def found(self, worker_id: WorkerId, blocks: Sequence[bytes]) -> None:
        """That worker has these without our doing."""
        if taker := self._takers.get(worker_id):
            taker.holds.update(blocks)

    def give(self, worker_id: WorkerId, chain: Sequence[bytes]) -> int:
        """That worker is about to get the chain; answers how many blocks are to be moved."""
        taker = self._takers.get(worker_id)
        if taker is None:
            return 0
        missing = taker.misses(chain)
        taker.taken += missing
        return missing

    def given(self, worker_id: WorkerId, chain: Sequence[bytes], *, missed: int, moved: int, held: int) -> None:
        """It has the first ``held`` blocks of it now; ``missed`` were to be moved, and ``moved`` were: it had the rest
        already, or did not get it.
        """
        if taker := self._takers.get(worker_id):
            taker.holds.update(chain[:held])
            taker.taken += moved - missed

    def drop(self, worker_id: WorkerId) -> None:
        """That worker takes nothing (any more)."""
        self._takers.pop(worker_id, None)


def copy_targets(me: WorkerRecord, records: Iterable[WorkerRecord]) -> list[CopyTarget]:
    """Those that stay and can read this worker's KV: engines of the same kind of work first, stores last."""
    key = me.fingerprint.key()
    return [
        CopyTarget(record.worker_id, _rank(me.role, record.role), record.kv_blocks)
        for record in records
        if record.worker_id != me.worker_id
        and record.phase is WorkerPhase.READY
        and record.prefix_caching
        and record.fingerprint.key() == key
    ]


def _rank(mine: Role, its: Role) -> int:
    if its is Role.STORE:
        return STORE
    return 0 if its is mine or Role.BOTH in (mine, its) else 1
