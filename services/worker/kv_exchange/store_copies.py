"""While a worker serves, prefixes that several requests have used are copied to a store, if there is one."""

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

ROUND_S = 5.0
"""Between two rounds."""
ROUND_S_MAX = 30.0
"""For the copies of one round."""
CHAINS_MAX = 64
"""In one round."""
COPIED_KEPT_MAX = 4096
"""Chains remembered as copied."""


class StoreCopies:
    """Copies in rounds. ``record`` returns the worker's registry record."""

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
        """Last blocks of the chains that the stores have."""
        self._round_at = -math.inf

    async def follow(self) -> None:
        """Until cancelled; returns at once if copying is switched off."""
        while self._uses_min:
            await asyncio.sleep(ROUND_S)
            await self.copy_round()

    async def copy_round(self) -> CopyTotals:
        """Copy the chains used since the last round; all chains if a store is new."""
        record, totals = self._record(), CopyTotals()
        stores = [one for one in self._exchange.peers.records if one.role is Role.STORE]
        targets = CopyTargets(copy_targets(record, stores))
        lives = {(store.worker_id, store.epoch) for store in stores}
        if lives - self._stores:
            self._copied.clear()
            self._round_at = -math.inf
        self._stores = lives
        if not targets:
            return totals
        began = self._clock.now()
        hot = await self._exchange.hot_chains(CHAINS_MAX, uses_min=self._uses_min, idle_s_max=began - self._round_at)
        self._round_at = began
        chains = [unpack_full_hashes(chain.hashes) for chain in hot]
        copier = PrefixCopier(
            self._bus,
            Identity(record.worker_id, record.epoch),
            targets,
            totals,
            left_s=lambda: began + ROUND_S_MAX - self._clock.now(),
        )
        for chain in chains:
            if targets and chain[-1] not in self._copied and await copier.copy(chain):
                self._remember(chain[-1])
        if totals.blocks:
            log.info("%d blocks of %d prefixes were copied to stores", totals.blocks, totals.prefixes)
        return totals

    def _remember(self, last_block: bytes) -> None:
        self._copied[last_block] = None
        if len(self._copied) > COPIED_KEPT_MAX:
            self._copied.popitem(last=False)
