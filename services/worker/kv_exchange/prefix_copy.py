"""Copies prefixes from this worker's engine to other workers.

``PrefixCopier`` orders other workers to fetch chains of blocks, and they read this worker's engine as in any fetch by
command. A draining worker uses it to save its hot prefixes. ``StoreCopies`` uses it while the worker serves, to copy to
a store, if there is one: prefixes that several requests have used, and those that the engine is about to evict.
"""

from __future__ import annotations

import asyncio
import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from shared.bounded import Bounded
from shared.bus.port import AskRefused, BusError
from shared.contracts.channels import KV_FETCH, AskChannel
from shared.contracts.failures import Reason
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import (
    LEASE_BLOCKS_MAX,
    FetchedKv,
    FetchKv,
    KvSource,
    pack_full_hashes,
    unpack_full_hashes,
)
from shared.contracts.workers import Role, WorkerPhase, WorkerRecord

if TYPE_CHECKING:
    from connector.groups import GroupPlan
    from connector.messages import Chain
    from services.worker.settings import Settings

TAKEN_SHARE_MAX = 0.5
"""Share of an engine's blocks that another worker's prefixes may fill: the engine has hot prefixes of its own."""
STORE_RANK = 2
FAR_STORE_RANK = 3
"""A store on another host."""


@dataclass(slots=True)
class CopyTarget:
    """A worker that may fetch prefixes."""

    worker_id: WorkerId
    rank: int
    """Targets with a smaller rank are preferred, whatever share of their memory is filled."""
    blocks: int
    """Blocks of the target's memory that may be filled. A store's memory may be filled entirely with such prefixes."""
    taken: int = 0
    holds: set[bytes] = field(default_factory=set)
    """Blocks of the draining worker that it is known to have."""

    def misses(self, chain: Sequence[bytes]) -> int:
        """How many blocks of the chain it is not known to have. What it has is always a prefix of the chain."""
        return len(chain) - bisect_left(chain, True, key=lambda block: block not in self.holds)


class CopyTargets:
    """Gives each chain to the target with the smallest share of its memory filled by copied prefixes: few blocks move,
    and no worker loses much of its cache.
    """

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
            if share <= (1.0 if target.rank >= STORE_RANK else TAKEN_SHARE_MAX):
                found.append((target.rank, share, (place + offset) % len(self._targets), target.worker_id))
        return [worker_id for *_reasons, worker_id in sorted(found)]

    def note_held(self, worker_id: WorkerId, blocks: Sequence[bytes]) -> None:
        """That worker had these blocks before anything was copied."""
        if target := self._targets.get(worker_id):
            target.holds.update(blocks)

    def missed_by(self, worker_id: WorkerId, chain: Sequence[bytes]) -> int:
        """How many blocks of the chain that worker is not known to have."""
        target = self._targets.get(worker_id)
        return len(chain) if target is None else target.misses(chain)

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
    """READY workers that can read this worker's KV: engines of the same role first, stores of other hosts last."""
    key = me.fingerprint.key()
    return [
        CopyTarget(record.worker_id, _rank(me, record), record.kv_tokens // record.hashing.block_size)
        for record in records
        if record.worker_id != me.worker_id
        and record.phase is WorkerPhase.READY
        and record.prefix_caching
        and record.fingerprint.key() == key
    ]


def _rank(me: WorkerRecord, its: WorkerRecord) -> int:
    if its.role is Role.STORE:
        return STORE_RANK if its.host == me.host else FAR_STORE_RANK
    return 0 if its.role is me.role or Role.BOTH in (me.role, its.role) else 1


log = logging.getLogger("baton.worker")

ASKED_MAX = 3
"""Workers that report which blocks of a chain they hold, before one is chosen."""
TRIES_MAX = 3
"""Workers that are ordered to fetch a chain, one after another, until one holds all of it."""
ASK_S_MAX = 0.5
"""Time limit for a worker to report which blocks it holds."""
FETCH_S_MAX = 10.0
"""Time limit for the fetch of one chain."""
OVERTIME_S = 3.0
"""Time for the response to arrive after a fetch's deadline."""

ROUND_S = 0.5
"""Interval of the rounds of ``StoreCopies``. An engine evicts what it has offered after seconds of prompts."""
ROUND_S_MAX = 30.0
"""Time limit for the copies of one round."""
CHAINS_MAX = 64
COPIED_KEPT_MAX = 4096
"""Chains remembered as copied."""
PINNED_SHARE_MAX = 0.1
"""Share of the engine's blocks that a copy to a store pins at a time. Of models with windows or states, boundaries are
copied, each at once.
"""
COPYING_SHARE_MAX = 0.2
"""Share of the time in which a worker's blocks are copied to stores: the rest of its link is for requests."""
PAUSE_S_MAX = 5.0
"""Maximum pause after a copy."""


@dataclass(slots=True)
class CopyTotals:
    """Totals with the meaning of the fields of ``WorkerDrained``."""

    prefixes: int = 0
    prefixes_left: int = 0
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Orders(Protocol):
    """The part of a ``Bus`` that carries orders to fetch."""

    async def ask(self, channel: AskChannel[FetchKv, FetchedKv], message: FetchKv, *, timeout_s: float) -> FetchedKv:
        """See ``Bus.ask``."""


class Waits:
    """How a copier waits. A replay waits in virtual time (``replay/tier.py``)."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def all_of(self, works: Iterable[Coroutine[Any, Any, None]]) -> None:
        await asyncio.gather(*works)


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast chains are copied."""

    blocks_at_once: int = LEASE_BLOCKS_MAX
    """Blocks that an order names beyond those that the target holds."""
    time_share: float = 1.0
    """Share of the time in which orders are under way."""


class CopiedEngine(Protocol):
    """The part of a ``WorkerExchange`` that tells what to copy."""

    @property
    def groups(self) -> GroupPlan: ...

    @property
    def records(self) -> Iterable[WorkerRecord]:
        """Records of the workers that can read its KV."""

    async def chains_for_store(
        self, chains_max: int, *, uses_min: int, idle_s_max: float, blocks_min: int
    ) -> tuple[list[Chain], int]: ...

    def note_copies(self, copied: int, lost: int) -> None: ...


class PrefixCopier:
    """Copies chains of the worker ``me`` to ``targets``. ``left_s`` returns the remaining seconds."""

    def __init__(
        self,
        bus: Orders,
        me: WorkerRecord,
        targets: CopyTargets,
        totals: CopyTotals,
        left_s: Callable[[], float],
        pace: Pace | None = None,
        waits: Waits | None = None,
    ) -> None:
        self._bus = bus
        self._source = KvSource(worker_id=me.worker_id, epoch=me.epoch)
        self._targets = targets
        self._totals = totals
        self._left_s = left_s
        self._pace = pace or Pace()
        self._waits = waits or Waits()

    async def copy_all(self, chains: Iterable[list[bytes]], *, at_once: int) -> None:
        """Copy each chain to one target, in this order, ``at_once`` at a time."""
        waiting = iter(chains)

        async def copy_some() -> None:
            for chain in waiting:
                if not self._targets:
                    return
                await self.copy(chain)

        async with asyncio.TaskGroup() as copiers:
            for _ in range(at_once):
                copiers.create_task(copy_some(), name="copy-chains")

    async def copy(self, chain: list[bytes]) -> int:
        """Copy one chain; returns how many of its blocks one target holds."""
        wanted = chain[:LEASE_BLOCKS_MAX]
        asked = self._targets.ranked(wanted)[:ASKED_MAX]
        if len(asked) > 1 or len(wanted) > self._pace.blocks_at_once:
            await self._waits.all_of(self._ask_held(worker_id, wanted) for worker_id in asked)
        most = 0
        for worker_id in self._targets.ranked(wanted)[:TRIES_MAX]:
            most = max(most, await self._order_fetches(worker_id, wanted))
            if most >= len(wanted):
                self._totals.prefixes += 1
                break
        return most

    async def _order_fetches(self, worker_id: WorkerId, chain: list[bytes]) -> int:
        """Let that worker fetch the chain piece by piece; returns how many of its blocks the worker holds then."""
        held, size = len(chain) - self._targets.missed_by(worker_id, chain), self._pace.blocks_at_once
        for end in [*range(held + size, len(chain), size), len(chain)]:
            began = self._waits.now()
            held = await self._order_fetch(worker_id, chain[:end])
            took_s = self._waits.now() - began
            if self._pace.time_share < 1.0:
                await self._waits.sleep(min(took_s / self._pace.time_share - took_s, PAUSE_S_MAX))
            if held < end:
                break
        return held

    async def _ask_held(self, worker_id: WorkerId, chain: list[bytes]) -> None:
        """Note which blocks the worker holds. A fetch without sources moves nothing and reports them."""
        fetched = await self._fetch(worker_id, chain, [], ASK_S_MAX)
        if fetched is not None:
            self._targets.note_held(worker_id, chain[: fetched.held])

    async def _order_fetch(self, worker_id: WorkerId, chain: list[bytes]) -> int:
        """Let that worker fetch the chain; returns how many of its blocks the worker holds afterwards."""
        missed = self._targets.reserve(worker_id, chain)
        result = await self._fetch(worker_id, chain, [self._source], min(FETCH_S_MAX, self._left_s())) or FetchedKv()
        held = min(result.held + result.fetched, len(chain))
        self._targets.note_fetched(worker_id, chain, missed=missed, moved=result.fetched, held=held)
        self._totals.blocks += result.fetched
        self._totals.bytes += result.bytes
        if held < len(chain):
            log.info("%s holds %d of %d blocks of a prefix: %s", worker_id, held, len(chain), result.failure)
        return held

    async def _fetch(
        self, worker_id: WorkerId, chain: list[bytes], sources: list[KvSource], seconds: float
    ) -> FetchedKv | None:
        """Send one order. A worker that does not reply, or refuses because it drains too, is dropped as a target."""
        if seconds <= 0.0:
            return None
        fetch = FetchKv(
            worker_id=worker_id,
            sender_id=self._source.worker_id,
            hashes=pack_full_hashes(chain),
            sources=sources,
            deadline_s=seconds,
        )
        try:
            return await self._bus.ask(KV_FETCH, fetch, timeout_s=seconds + OVERTIME_S)
        except AskRefused as refused:
            log.info("%s refuses to fetch a prefix: %s", worker_id, refused)
            if refused.failure.reason is not Reason.WORKER_BUSY:
                self._targets.drop(worker_id)
        except BusError as error:
            log.info("%s cannot be ordered to fetch prefixes: %s", worker_id, error or type(error).__name__)
            self._targets.drop(worker_id)
        return None


class StoreCopies:
    """Copies chains to stores in rounds. ``record`` returns the worker's registry record."""

    def __init__(
        self,
        bus: Orders,
        exchange: CopiedEngine,
        record: Callable[[], WorkerRecord],
        settings: Settings,
        waits: Waits | None = None,
    ) -> None:
        self._bus = bus
        self._exchange = exchange
        self._record = record
        self._waits = waits or Waits()
        self._uses_min = settings.kv_copy_uses_min
        self._tokens_min = settings.kv_fetch_min_tokens
        self._stores: set[tuple[WorkerId, Epoch]] = set()
        self._copied = Bounded[bytes, None](COPIED_KEPT_MAX)
        """Last blocks of the chains that the stores hold."""
        self._round_at = -math.inf

    async def follow(self) -> None:
        """Run rounds until cancelled; returns at once if copying is switched off."""
        while self._uses_min:
            await self._waits.sleep(ROUND_S)
            await self.copy_round()

    async def copy_round(self) -> CopyTotals:
        """Copy the chains that the engine evicts next, and the hot chains used since the last round, or all of both if
        a store is new.
        """
        record, totals = self._record(), CopyTotals()
        stores = [one for one in self._exchange.records if one.role is Role.STORE]
        targets = CopyTargets(copy_targets(record, stores))
        lives = {(store.worker_id, store.epoch) for store in stores}
        if lives - self._stores:
            self._copied.clear()
            self._round_at = -math.inf
        self._stores = lives
        if not targets:
            return totals
        began, groups = self._waits.now(), self._exchange.groups
        blocks_at_once = LEASE_BLOCKS_MAX
        if groups.keeps_prefix:
            blocks_at_once = max(1, int(record.kv_tokens // groups.unit * PINNED_SHARE_MAX))
        chains, lost = await self._exchange.chains_for_store(
            CHAINS_MAX,
            uses_min=self._uses_min,
            idle_s_max=began - self._round_at,
            blocks_min=max(self._tokens_min, groups.alignment) // groups.unit,
        )
        self._round_at = began
        copier = PrefixCopier(
            self._bus,
            record,
            targets,
            totals,
            left_s=lambda: began + ROUND_S_MAX - self._waits.now(),
            pace=Pace(blocks_at_once, COPYING_SHARE_MAX),
            waits=self._waits,
        )
        for chain in chains:
            hashes = unpack_full_hashes(chain.hashes)
            if chain.is_evicting or hashes[-1] not in self._copied:
                held = await copier.copy(hashes)
                if held >= len(hashes):
                    self._copied[hashes[-1]] = None
                elif chain.is_evicting:
                    lost += len(hashes) - held
        self._exchange.note_copies(totals.blocks, lost)
        if totals.blocks:
            log.info("%d blocks of %d prefixes were copied to stores", totals.blocks, totals.prefixes)
        return totals
