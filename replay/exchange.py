"""How KV moves between simulated engines: asked for, granted by what is there, and read over the reader's one link."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replay.legs import Leg
from replay.simworker import SimWorker
from shared.contracts.ids import WorkerId

At = Callable[..., None]
"""``at(when, call, *arguments)``."""


class Exchange:
    """Of one world. Blocks being read are pinned where they are."""

    def __init__(self, workers: dict[WorkerId, SimWorker], at: At, woken: Callable[[SimWorker], Any]) -> None:
        self._workers = workers
        self._at = at
        self._woken = woken

    def asks(self, leg: Leg, now: float) -> None:
        """The prompt's turn has come, and others should have more of it: they answer a little later."""
        self._at(now + leg.worker.engine.profile.ask_s, self._granted, leg)

    def receives(self, leg: Leg, now: float) -> None:
        """Room is made: what is there can be read."""
        job, prefill = leg.job, leg.reads_from
        leg.booked_tokens = job.computed
        assert job.granted is not None
        if prefill is None:
            self._book(leg, job.granted, now)
        else:
            self._follow(leg, prefill, prefill.job.filled * leg.worker.engine.profile.block_tokens, now)

    def computed(self, prefill: Leg, now: float) -> None:
        """More of a prompt is there, or all of it: whoever reads it goes on."""
        leg = prefill.read_by
        if leg is not None and leg.job in leg.worker.engine.receiving:
            self._follow(leg, prefill, prefill.job.computed, now)

    def prefill_finished(self, prefill: Leg) -> None:
        """Its blocks stay until they have been read."""
        leg = prefill.read_by
        if leg is None or leg.job.fetches or leg.job in leg.worker.engine.receiving:
            self._pin(prefill, prefill.worker, list(prefill.job.holding.named))

    def read_over(self, leg: Leg, now: float) -> None:
        """It needs nobody's blocks any more."""
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
        """Each source gives what it has of its part of the chain, as far as it joins the parts before it."""
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
