"""Before a worker leaves: its hot prefixes go to workers that stay, so that conversations find their cache there.

The staying workers do the work, each as for any other fetch by command; this one only tells them what to fetch, and its
engine lets itself be read.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from services.worker.core.spread import Spread, takers
from services.worker.exchange.worker_exchange import WorkerExchange
from shared.bus.port import AskRefused, Bus, BusError
from shared.contracts.channels import KV_FETCH, WORKER_RECORDS
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import (
    LEASE_BLOCKS_MAX,
    FetchedKv,
    FetchKv,
    KvSource,
    pack_full_hashes,
    unpack_full_hashes,
)
from shared.contracts.workers import WORKER_RECORD_TTL_S, WorkerRecord
from shared.runtime.clock import Clock

log = logging.getLogger("baton.worker")

CHAINS_MAX = 256
"""Moved at most, the hottest first."""
CHAINS_AT_ONCE_MAX = 4
"""What they pin here, and what they take of the network, at a time."""
LOOKED_AT_MAX = 3
"""Workers that are asked what they have of a chain already, before one is chosen."""
TRIES_MAX = 3
"""Workers that are told to fetch one chain, one after the other."""
LOOK_S_MAX = 0.5
"""For a worker to say what it has."""
FETCH_S_MAX = 10.0
"""For one chain."""
OVERTIME_S = 3.0
"""A worker ends a fetch at its deadline; its answer needs a moment."""


@dataclass(slots=True)
class Evacuated:
    """How it went, in the words of ``WorkerDrained``."""

    prefixes: int = 0
    prefixes_left: int = 0
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0


async def evacuate(
    bus: Bus, clock: Clock, exchange: WorkerExchange, record: WorkerRecord, *, s_max: float
) -> Evacuated:
    """Have others fetch what ``record``'s worker is about to take with it, for ``s_max`` seconds at most.

    Never raises for what others do or do not do: what nobody took in time is counted as left.
    """
    began = clock.now()
    done = Evacuated()
    try:
        async with asyncio.timeout(s_max):
            chains = [unpack_full_hashes(chain.hashes) for chain in await exchange.hot_chains(CHAINS_MAX)]
            done.prefixes_left = len(chains)
            if chains:
                ends_at = began + s_max
                await Evacuation(bus, clock, record, await _spread(bus, record), ends_at, done).move_all(chains)
    except TimeoutError:
        log.info("evacuation ended at its deadline of %g s", s_max)
    except BusError as error:
        log.warning("evacuation ended early: %s", error)
    done.seconds = clock.now() - began
    return done


class Evacuation:
    """One leaving worker's chains on their way to others."""

    def __init__(
        self, bus: Bus, clock: Clock, record: WorkerRecord, spread: Spread, ends_at: float, done: Evacuated
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._source = KvSource(worker_id=record.worker_id, epoch=record.epoch)
        self._spread = spread
        self._ends_at = ends_at
        self._done = done

    async def move_all(self, chains: list[list[bytes]]) -> None:
        """Each to somebody, the first ones first."""
        waiting = iter(chains)

        async def move_some() -> None:
            for chain in waiting:
                if not self._spread:
                    return
                if await self._move(chain[:LEASE_BLOCKS_MAX]):
                    self._done.prefixes += 1
                    self._done.prefixes_left -= 1

        async with asyncio.TaskGroup() as movers:
            for _ in range(CHAINS_AT_ONCE_MAX):
                movers.create_task(move_some(), name="evacuate-chains")

    async def _move(self, chain: list[bytes]) -> bool:
        """Whether somebody has all of it now."""
        looked_at = self._spread.best(chain)[:LOOKED_AT_MAX]
        if len(looked_at) > 1:
            await asyncio.gather(*[self._look(worker_id, chain) for worker_id in looked_at])
        for worker_id in self._spread.best(chain)[:TRIES_MAX]:
            if await self._give(worker_id, chain) >= len(chain):
                return True
        return False

    async def _look(self, worker_id: WorkerId, chain: list[bytes]) -> None:
        """A fetch that names no source tells what is there already."""
        answer = await self._ask(worker_id, chain, [], LOOK_S_MAX)
        if answer is not None:
            self._spread.found(worker_id, chain[: answer.held])

    async def _give(self, worker_id: WorkerId, chain: list[bytes]) -> int:
        """How many of its blocks that worker has now."""
        missed = self._spread.give(worker_id, chain)
        left_s = self._ends_at - self._clock.now()
        answer = await self._ask(worker_id, chain, [self._source], min(FETCH_S_MAX, left_s)) or FetchedKv()
        held = min(answer.held + answer.fetched, len(chain))
        self._spread.given(worker_id, chain, missed=missed, held=held)
        self._done.blocks += answer.fetched
        self._done.bytes += answer.bytes
        if held < len(chain):
            log.info("%s has %d of %d blocks of a prefix: %s", worker_id, held, len(chain), answer.failure)
        return held

    async def _ask(
        self, worker_id: WorkerId, chain: list[bytes], sources: list[KvSource], seconds: float
    ) -> FetchedKv | None:
        """One that does not answer, or refuses since it leaves too, is asked no more."""
        if seconds <= 0.0:
            return None
        fetch = FetchKv(worker_id=worker_id, hashes=pack_full_hashes(chain), sources=sources, deadline_s=seconds)
        try:
            return await self._bus.ask(KV_FETCH, fetch, timeout_s=seconds + OVERTIME_S)
        except AskRefused as refused:
            if refused.failure.reason is not Reason.WORKER_BUSY:
                self._spread.drop(worker_id)
        except BusError as error:
            log.info("%s takes no prefixes: %s", worker_id, error or type(error).__name__)
            self._spread.drop(worker_id)
        return None


async def _spread(bus: Bus, record: WorkerRecord) -> Spread:
    """Among those that the registry has now. Raises BusError."""
    kept = await bus.kept(WORKER_RECORDS, ttl_s=WORKER_RECORD_TTL_S)
    records = [entry.value for entry in await kept.all() if entry.value is not None]
    return Spread(takers(record, records))
