"""Before a worker ends, other workers fetch its hot prefixes, so that conversations find their cache there."""

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
"""The hottest ones are copied, no more than this."""
CHAINS_AT_ONCE_MAX = 4
"""Limits the blocks pinned here and the share of the network."""
EVACUATE_S_MAX = 10.0


async def evacuate(
    bus: Bus, clock: Clock, exchange: WorkerExchange, record: WorkerRecord, *, s_max: float = EVACUATE_S_MAX
) -> CopyTotals:
    """Copy the hot prefixes of ``record``'s worker to others, for at most ``s_max`` seconds.

    Never raises for what other workers do: a prefix that no worker took in time is counted as left.
    """
    began = clock.now()
    totals, chains = CopyTotals(), list[list[bytes]]()
    try:
        async with asyncio.timeout(s_max):
            chains = [unpack_full_hashes(chain.hashes) for chain in await exchange.hot_chains(CHAINS_MAX)]
            await exchange.peers.all_read()
            targets = CopyTargets(copy_targets(record, exchange.peers.records))
            identity = Identity(record.worker_id, record.epoch)
            copier = PrefixCopier(bus, identity, targets, totals, left_s=lambda: began + s_max - clock.now())
            await copier.copy_all(chains, at_once=CHAINS_AT_ONCE_MAX)
    except TimeoutError:
        log.info("evacuation ended at its deadline of %g s", s_max)
    totals.prefixes_left = len(chains) - totals.prefixes
    totals.seconds = clock.now() - began
    return totals
