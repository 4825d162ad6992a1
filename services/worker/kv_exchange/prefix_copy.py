"""Prefixes that this worker's engine holds on their way to others: before it leaves, or to a store while it serves.

The others do the work, each as for any other fetch by command; this one only tells them what to fetch, and its engine
lets itself be read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.worker.engines.port import Identity
from services.worker.kv_exchange.copy_targets import CopyTargets
from shared.bus.port import AskRefused, Bus, BusError
from shared.contracts.channels import KV_FETCH
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import LEASE_BLOCKS_MAX, FetchedKv, FetchKv, KvSource, pack_full_hashes

log = logging.getLogger("baton.worker")

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
class CopyTotals:
    """How it went, in the words of ``WorkerDrained``."""

    prefixes: int = 0
    prefixes_left: int = 0
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0


class PrefixCopier:
    """Chains of one worker, spread over those that take them. ``left_s``: how much time there still is."""

    def __init__(
        self, bus: Bus, identity: Identity, spread: CopyTargets, done: CopyTotals, left_s: Callable[[], float]
    ) -> None:
        self._bus = bus
        self._source = KvSource(worker_id=identity.worker_id, epoch=identity.epoch)
        self._spread = spread
        self._done = done
        self._left_s = left_s

    async def copy_all(self, chains: Iterable[list[bytes]], *, at_once: int) -> None:
        """Each to somebody, the first ones first."""
        waiting = iter(chains)

        async def copy_some() -> None:
            for chain in waiting:
                if not self._spread:
                    return
                await self.copy(chain)

        async with asyncio.TaskGroup() as copiers:
            for _ in range(at_once):
                copiers.create_task(copy_some(), name="copy-chains")

    async def copy(self, chain: list[bytes]) -> bool:
        """Whether somebody has all of it now."""
        wanted = chain[:LEASE_BLOCKS_MAX]
        looked_at = self._spread.best(wanted)[:LOOKED_AT_MAX]
        if len(looked_at) > 1:
            await asyncio.gather(*[self._look(worker_id, wanted) for worker_id in looked_at])
        for worker_id in self._spread.best(wanted)[:TRIES_MAX]:
            if await self._give(worker_id, wanted) >= len(wanted):
                self._done.prefixes += 1
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
        answer = await self._ask(worker_id, chain, [self._source], min(FETCH_S_MAX, self._left_s())) or FetchedKv()
        held = min(answer.held + answer.fetched, len(chain))
        self._spread.given(worker_id, chain, missed=missed, moved=answer.fetched, held=held)
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
            log.info("%s refuses a prefix: %s", worker_id, refused)
            if refused.failure.reason is not Reason.WORKER_BUSY:
                self._spread.drop(worker_id)
        except BusError as error:
            log.info("%s takes no prefixes: %s", worker_id, error or type(error).__name__)
            self._spread.drop(worker_id)
        return None
