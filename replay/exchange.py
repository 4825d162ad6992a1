"""KV exchange between simulated engines: request, grant, and read over the reader's link."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replay.legs import Leg
from replay.simworker import SimWorker
from shared.contracts.ids import WorkerId

At = Callable[..., None]
"""``at(when, call, *arguments)``."""


class Exchange:
    """The KV exchange of one world. Blocks are pinned at their holder while they are read."""

    def __init__(self, workers: dict[WorkerId, SimWorker], at: At, woken: Callable[[SimWorker], Any]) -> None:
        self._workers = workers
        self._at = at
        self._woken = woken

    def asks(self, leg: Leg, now: float) -> None:
        """Request KV of a job's sources; the grant arrives after ``ask_s``."""
        self._at(now + leg.worker.engine.profile.ask_s, self._granted, leg)

    def receives(self, leg: Leg, now: float) -> None:
        """Start reading the granted tokens that exist already."""
        job, prefill = leg.job, leg.reads_from
        leg.booked_tokens = job.computed
        assert job.granted is not None
        if prefill is None:
            self._book(leg, job.granted, now)
        else:
            self._follow(leg, prefill, prefill.job.filled * leg.worker.engine.profile.block_tokens, now)

    def computed(self, prefill: Leg, now: float) -> None:
        """A prefill leg computed more tokens: its reader continues."""
        leg = prefill.read_by
        if leg is not None and leg.job in leg.worker.engine.receiving:
            self._follow(leg, prefill, prefill.job.computed, now)

    def prefill_finished(self, prefill: Leg) -> None:
        """Pin the blocks of a finished prefill leg until they are read."""
        leg = prefill.read_by
        if leg is None or leg.job.fetches or leg.job in leg.worker.engine.receiving:
            self._pin(prefill, prefill.worker, list(prefill.job.holding.named))

    def read_over(self, leg: Leg, now: float) -> None:
        """Release the blocks that were pinned for a leg."""
        for one in (leg, leg.reads_from):
            for holder, names in one.pins if one is not None else ():
                holder.changes(now)
                holder.engine.pool.unhold(names)
                self._at(now, self._poke, holder)
            if one is not None:
                one.pins.clear()

    def _poke(self, now: float, worker: SimWorker) -> None:
        worker.engine.poke(now)
        self._woken(worker)

    def _follow(self, leg: Leg, prefill: Leg, computed: int, now: float) -> None:
        assert leg.job.granted is not None
        whole = prefill.job.first_token_at is not None
        tokens = leg.job.granted if whole else min(computed, leg.job.granted)
        if tokens > leg.booked_tokens or whole:
            self._book(leg, tokens, now)

    def _granted(self, now: float, leg: Leg) -> None:
        """Grant the blocks that each source holds, as far as they extend the chain without a gap."""
        job, engine = leg.job, leg.worker.engine
        size = engine.profile.block_tokens
        limit = job.cacheable(size)
        depth = engine.pool.depth(job.chain, limit)
        for source in leg.sources:
            holder = self._workers.get(source.worker_id)
            if holder is None:
                continue
            has = holder.engine.pool.depth(job.chain, min(limit, source.end or limit))
            if has > depth:
                self._pin(leg, holder, list(job.chain[depth:has]))
                depth = has
        job.granted = depth * size
        leg.worker.changes(now)
        engine.poke(now)
        self._woken(leg.worker)

    def _book(self, leg: Leg, tokens: int, now: float) -> None:
        arrives_at = leg.worker.book(max(0, tokens - leg.booked_tokens), now)
        leg.booked_tokens = max(leg.booked_tokens, tokens)
        if leg.booked_tokens == max(leg.job.granted or 0, leg.job.computed):
            self._at(arrives_at, self._arrived, leg)

    def _arrived(self, now: float, leg: Leg) -> None:
        if leg.job not in leg.worker.engine.receiving:
            return
        leg.worker.changes(now)
        leg.worker.engine.received(leg.job, leg.booked_tokens, now)
        self.read_over(leg, now)
        self._woken(leg.worker)

    def _pin(self, leg: Leg, holder: SimWorker, names: list[int]) -> None:
        holder.engine.pool.hold(names)
        leg.pins.append((holder, names))
