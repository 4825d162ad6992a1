"""A replayed request, its legs, and the KV exchange between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from replay.engine import Job
from replay.simworker import SimWorker
from replay.tier import SimStore
from replay.traces import Request
from services.router.placement.placement import Placement
from services.router.state.worker_view import Sent
from shared.contracts.ids import WorkerId
from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import KvSource


@dataclass(slots=True, eq=False)
class ReplayedRequest:
    """One request and its outcome. Times are those seen by the client."""

    number: int
    request: Request
    """In a closed loop, ``at_s`` becomes true when it arrives."""
    chain: tuple[int, ...]
    """Names of the full blocks of its prompt, and of those that its answer fills."""
    placement: Placement | None = None
    placed_at: float | None = None
    refused_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    cached_tokens: int = 0
    """Prompt tokens cached at the worker that computed the prompt."""
    fetched_tokens: int = 0
    tier_tokens: int = 0
    """Part of ``fetched_tokens`` that stores in host memory had."""
    preemptions: int = 0

    @property
    def ttft_s(self) -> float:
        """Seconds; the request must have been served."""
        assert self.first_token_at is not None
        return self.first_token_at - self.request.at_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds between tokens; 0 for a single token."""
        assert self.first_token_at is not None
        assert self.finished_at is not None
        return (self.finished_at - self.first_token_at) / max(1, self.request.output_tokens - 1)


@dataclass(slots=True, eq=False)
class Leg:
    """The part of a request that one worker serves."""

    kind: LegKind
    replayed: ReplayedRequest
    worker: SimWorker
    job: Job
    sent: Sent
    uncached_tokens: int = 0
    """Uncached prompt tokens that placement predicted."""
    context_tokens: int = 0
    """Tokens that it takes of the free KV: those that running legs hold already do not count."""
    sources: tuple[KvSource, ...] = ()
    reads_from: Leg | None = None
    """The prefill leg whose KV this one reads."""
    read_by: Leg | None = None
    booked_tokens: int = 0
    """Prompt tokens, from the start, that have arrived or are on a link."""
    loaded_at: float = 0.0
    """Time at which the tokens that host memory holds have arrived; 0: nothing is loaded."""
    tier_tokens: int = 0
    """Granted tokens that the store of its worker's host has."""
    far_tokens: int = 0
    """Granted tokens that stores of other hosts have."""
    pins: list[Callable[[float], None]] = field(default_factory=list)
    """Releases, by the time, what holders have pinned until it is read."""


At = Callable[..., None]
"""``at(when, call, *arguments)``."""


class Exchange:
    """The KV exchange of one world: request, grant, and read over the reader's link. Blocks are pinned at their holder
    while they are read.
    """

    def __init__(
        self,
        workers: dict[WorkerId, SimWorker],
        stores: Mapping[WorkerId, SimStore],
        at: At,
        woken: Callable[[SimWorker], Any],
    ) -> None:
        self._workers = workers
        self._stores = stores
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
        self._load(leg, now)
        if prefill is None:
            self._book(leg, job.granted, now)
        else:
            self._follow(leg, prefill, prefill.job.filled * leg.worker.engine.profile.block_tokens, now)

    def _load(self, leg: Leg, now: float) -> None:
        """Load what host memory holds behind the cache; only the rest is read from other workers."""
        job, engine = leg.job, leg.worker.engine
        if leg.tier_tokens:
            leg.booked_tokens = min(leg.booked_tokens + leg.tier_tokens, job.granted or 0)
            leg.loaded_at = leg.worker.load(leg.tier_tokens, now)
        if engine.host is None or job.granted is None:
            return
        size = engine.profile.block_tokens
        held = min(job.granted // size, engine.host.depth(job.chain, job.computed // size, job.cacheable(size)))
        tokens = held * size - job.computed
        if tokens > 0:
            leg.booked_tokens = held * size
            leg.loaded_at = leg.worker.load(tokens, now)
            if not job.preemptions:
                job.loaded_tokens = tokens

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
            for release in one.pins if one is not None else ():
                release(now)
            if one is not None:
                one.pins.clear()

    def unpin(self, holder: SimWorker, names: list[int], now: float) -> None:
        """Nobody reads these blocks any more for whom they were pinned."""
        holder.changes(now)
        holder.engine.pool.unhold(names)
        if holder.offers is not None:
            holder.offers.freed(names)
        self._at(now, self._poke, holder)

    def _poke(self, now: float, worker: SimWorker) -> None:
        worker.engine.poke(now)
        self._woken(worker)

    def _follow(self, leg: Leg, prefill: Leg, computed: int, now: float) -> None:
        assert leg.job.granted is not None
        whole = prefill.job.first_token_at is not None
        # Windows and states come when the prompt is computed, and with them the end.
        end = leg.job.granted - (leg.worker.engine.profile.other_groups is not None)
        tokens = leg.job.granted if whole else min(computed, end)
        if tokens > leg.booked_tokens or whole:
            self._book(leg, tokens, now)

    def _granted(self, now: float, leg: Leg) -> None:
        """Grant the blocks that each source holds, as far as they extend the chain without a gap. Of a model with other
        groups the first source that has a later boundary grants all.
        """
        job, engine = leg.job, leg.worker.engine
        size = engine.profile.block_tokens
        limit = job.cacheable(size)
        depth = engine.local_depth(job)
        leg.tier_tokens = leg.far_tokens = 0
        for source in leg.sources:
            if store := self._stores.get(source.worker_id):
                depth += self._borrow(leg, store, depth, min(limit, source.end or limit)) // size
                continue
            holder = self._workers.get(source.worker_id)
            if holder is None:
                continue
            pool = holder.engine.pool
            has = pool.boundary(job.chain, pool.depth(job.chain, min(limit, source.end or limit)))
            if has > depth:
                self._pin(leg, holder, [*pool.kept_at(job.chain, has), *job.chain[depth:has]])
                depth = has
                if engine.profile.other_groups is not None:
                    break
        job.granted = depth * size
        leg.worker.changes(now)
        engine.poke(now)
        self._woken(leg.worker)

    def _borrow(self, leg: Leg, store: SimStore, first: int, limit: int) -> int:
        """Hold a store's blocks for a leg; returns how many tokens they have."""
        blocks = store.lend(leg.job.chain, first, limit)
        if not blocks:
            return 0
        leg.pins.append(lambda _now: store.release(blocks))
        tokens = len(blocks) * leg.worker.engine.profile.block_tokens
        if store.host == leg.worker.record.host:
            leg.tier_tokens += tokens
        else:
            leg.far_tokens += tokens
        return tokens

    def _book(self, leg: Leg, tokens: int, now: float) -> None:
        last = max(leg.job.granted or 0, leg.job.computed)
        kept = self._kept(leg, last) if tokens >= last else 0
        if tokens > leg.booked_tokens or not leg.loaded_at:
            arrives_at = max(leg.loaded_at, leg.worker.book(max(0, tokens - leg.booked_tokens), kept, now))
        else:
            arrives_at = max(now, leg.loaded_at)
        leg.booked_tokens = max(leg.booked_tokens, tokens)
        if leg.booked_tokens == last:
            self._at(arrives_at, self._arrived, leg)

    def _kept(self, leg: Leg, tokens: int) -> int:
        """Blocks of windows or states that come where a read ends."""
        others = leg.worker.engine.profile.other_groups
        if others is None:
            return 0
        kept = others.blocks_at(-(-tokens // leg.worker.engine.profile.block_tokens))
        if not leg.job.preemptions:
            leg.job.received_kept = kept
        return kept

    def _arrived(self, now: float, leg: Leg) -> None:
        if leg.job not in leg.worker.engine.receiving:
            return
        leg.worker.changes(now)
        leg.worker.engine.received(leg.job, leg.booked_tokens, now)
        self.read_over(leg, now)
        self._woken(leg.worker)

    def _pin(self, leg: Leg, holder: SimWorker, names: list[int]) -> None:
        holder.engine.pool.hold(names)
        leg.pins.append(partial(self.unpin, holder, names))
