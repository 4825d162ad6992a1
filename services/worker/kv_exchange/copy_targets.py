"""Chooses which worker gets which prefix of one that drains: few blocks move, and no worker loses much of its cache."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shared.contracts.ids import WorkerId
from shared.contracts.workers import Role, WorkerPhase, WorkerRecord

TAKEN_SHARE_MAX = 0.5
"""Of an engine's blocks, that another worker's prefixes may fill: the engine has hot prefixes of its own."""
STORE_RANK = 2


@dataclass(slots=True)
class CopyTarget:
    """A worker that may fetch prefixes."""

    worker_id: WorkerId
    rank: int
    """Targets with a smaller rank are preferred, whatever share of their memory is filled."""
    blocks: int
    """Of its memory. A store's memory may be filled entirely with such prefixes."""
    taken: int = 0
    holds: set[bytes] = field(default_factory=set)
    """Blocks of the draining worker that it is known to have."""

    def misses(self, chain: Sequence[bytes]) -> int:
        """How many blocks of the chain it is not known to have. What it has is always a prefix of the chain."""
        return len(chain) - bisect_left(chain, True, key=lambda block: block not in self.holds)


class CopyTargets:
    """Gives each chain to the target with the smallest share of its memory filled by copied prefixes."""

    def __init__(self, targets: Iterable[CopyTarget]) -> None:
        known = sorted(targets, key=lambda target: target.worker_id)
        self._targets = {target.worker_id: target for target in known if target.blocks > 0}

    def __bool__(self) -> bool:
        return bool(self._targets)

    def ranked(self, chain: Sequence[bytes]) -> list[WorkerId]:
        """Targets that could take the chain, the best first."""
        found = []
        offset = int.from_bytes(chain[-1][-4:])  # Breaks ties the same way on every worker that copies this chain.
        for place, target in enumerate(self._targets.values()):
            share = (target.taken + target.misses(chain)) / target.blocks
            if share <= (1.0 if target.rank == STORE_RANK else TAKEN_SHARE_MAX):
                found.append((target.rank, share, (place + offset) % len(self._targets), target.worker_id))
        return [worker_id for *_reasons, worker_id in sorted(found)]

    def note_held(self, worker_id: WorkerId, blocks: Sequence[bytes]) -> None:
        """That worker had these blocks before anything was copied."""
        if target := self._targets.get(worker_id):
            target.holds.update(blocks)

    def reserve(self, worker_id: WorkerId, chain: Sequence[bytes]) -> int:
        """That worker is about to fetch the chain; returns how many blocks it has to fetch."""
        target = self._targets.get(worker_id)
        if target is None:
            return 0
        missing = target.misses(chain)
        target.taken += missing
        return missing

    def note_fetched(self, worker_id: WorkerId, chain: Sequence[bytes], *, missed: int, moved: int, held: int) -> None:
        """It has the first ``held`` blocks now. It fetched ``moved`` of the ``missed`` blocks that were reserved; it
        had the others, or did not get them.
        """
        if target := self._targets.get(worker_id):
            target.holds.update(chain[:held])
            target.taken += moved - missed

    def drop(self, worker_id: WorkerId) -> None:
        """That worker fetches nothing any more."""
        self._targets.pop(worker_id, None)


def copy_targets(me: WorkerRecord, records: Iterable[WorkerRecord]) -> list[CopyTarget]:
    """READY workers that can read this worker's KV: engines of the same role first, stores last."""
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
        return STORE_RANK
    return 0 if its is mine or Role.BOTH in (mine, its) else 1
