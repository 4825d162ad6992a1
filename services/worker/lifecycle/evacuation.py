"""Before a worker leaves: its hot prefixes go to workers that stay, so that conversations find their cache there."""

from __future__ import annotations

import asyncio
import logging

from services.worker.engines.port import Identity
from services.worker.kv_exchange.copy_targets import CopyTargets, copy_targets
from services.worker.kv_exchange.prefix_copy import CopyTotals, PrefixCopier
from services.worker.kv_exchange.worker_exchange import WorkerExchange
from shared.bus.port import Bus
from shared.contracts.kv_exchange import unpack_full_hashes
from shared.contracts.workers import WorkerRecord
from shared.runtime.clock import Clock

log = logging.getLogger("baton.worker")

CHAINS_MAX = 256
"""Moved at most, the hottest first."""
CHAINS_AT_ONCE_MAX = 4
"""What they pin here, and what they take of the network, at a time."""


async def evacuate(
    bus: Bus, clock: Clock, exchange: WorkerExchange, record: WorkerRecord, *, s_max: float
) -> CopyTotals:
    """Have others fetch what ``record``'s worker is about to take with it, for ``s_max`` seconds at most.

    Never raises for what others do or do not do: what nobody took in time is counted as left.
    """
    began = clock.now()
    done, chains = CopyTotals(), list[list[bytes]]()
    try:
        async with asyncio.timeout(s_max):
            chains = [unpack_full_hashes(chain.hashes) for chain in await exchange.hot_chains(CHAINS_MAX)]
            await exchange.peers.all_read()
            spread = CopyTargets(copy_targets(record, exchange.peers.records))
            me = Identity(record.worker_id, record.epoch)
            copying = PrefixCopier(bus, me, spread, done, left_s=lambda: began + s_max - clock.now())
            await copying.copy_all(chains, at_once=CHAINS_AT_ONCE_MAX)
    except TimeoutError:
        log.info("evacuation ended at its deadline of %g s", s_max)
    done.prefixes_left = len(chains) - done.prefixes
    done.seconds = clock.now() - began
    return done
