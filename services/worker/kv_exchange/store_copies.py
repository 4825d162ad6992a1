"""While a worker serves: prefixes that more than one request has used are copied to a store, if there is one."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable

from services.worker.engines.port import Identity
from services.worker.kv_exchange.copy_targets import CopyTargets, copy_targets
from services.worker.kv_exchange.prefix_copy import CopyTotals, PrefixCopier
from services.worker.kv_exchange.worker_exchange import WorkerExchange
from services.worker.settings import Settings
from shared.bus.port import Bus
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import unpack_full_hashes
from shared.contracts.workers import Role, WorkerRecord
from shared.runtime.clock import Clock

log = logging.getLogger("baton.worker")

LOOK_S = 5.0
"""From one look at the engine's hot prefixes to the next."""
ROUND_S_MAX = 30.0
"""For the copies of one look."""
CHAINS_MAX = 64
"""In one look."""
COPIED_KEPT_MAX = 4096
"""Chains that are remembered as copied."""


class StoreCopies:
    """See the module. ``record`` answers what this worker has registered."""

    def __init__(
        self, bus: Bus, clock: Clock, exchange: WorkerExchange, record: Callable[[], WorkerRecord], settings: Settings
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._exchange = exchange
        self._record = record
        self._uses_min = settings.kv_copy_uses_min
        self._stores: set[tuple[WorkerId, Epoch]] = set()
        self._copied: OrderedDict[bytes, None] = OrderedDict()
        """Last blocks of the chains that a store has."""
        self._looked_at = -math.inf

    async def follow(self) -> None:
        """For ever, unless nothing is to be copied."""
        while self._uses_min:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> CopyTotals:
        """Copy what was used since the last look; of a store that is new, everything."""
        record, done = self._record(), CopyTotals()
        stores = [one for one in self._exchange.peers.records if one.role is Role.STORE]
        spread = CopyTargets(copy_targets(record, stores))
        lives = {(store.worker_id, store.epoch) for store in stores}
        if lives - self._stores:
            self._copied.clear()
            self._looked_at = -math.inf
        self._stores = lives
        if not spread:
            return done
        began = self._clock.now()
        told = await self._exchange.hot_chains(CHAINS_MAX, uses_min=self._uses_min, idle_s_max=began - self._looked_at)
        self._looked_at = began
        chains = [unpack_full_hashes(chain.hashes) for chain in told]
        copying = PrefixCopier(
            self._bus,
            Identity(record.worker_id, record.epoch),
            spread,
            done,
            left_s=lambda: began + ROUND_S_MAX - self._clock.now(),
        )
        for chain in chains:
            if spread and chain[-1] not in self._copied and await copying.copy(chain):
                self._remember(chain[-1])
        if done.blocks:
            log.info("%d blocks of %d prefixes were copied to stores", done.blocks, done.prefixes)
        return done

    def _remember(self, last_block: bytes) -> None:
        self._copied[last_block] = None
        if len(self._copied) > COPIED_KEPT_MAX:
            self._copied.popitem(last=False)
