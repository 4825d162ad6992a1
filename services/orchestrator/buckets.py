"""The key-value buckets. Every orchestrator keeps them in being; no other party's key permits it."""

from __future__ import annotations

import asyncio
import logging

from shared.bus.port import Bus, BusError
from shared.contracts.channels import DEFAULT_MODE, LEADERSHIP, WANTED_ADAPTERS, WORKER_RECORDS
from shared.contracts.workers import WORKER_RECORD_TTL_S

log = logging.getLogger(__name__)

CHECK_S = 5.0


async def make_buckets(bus: Bus, lease_s: float) -> None:
    """Make those that are missing, and put right those that are not as they should be. Raises BusDown."""
    await bus.make_bucket(WORKER_RECORDS, ttl_s=WORKER_RECORD_TTL_S)
    await bus.make_bucket(LEADERSHIP, ttl_s=lease_s)
    await bus.make_bucket(DEFAULT_MODE, ttl_s=None)
    await bus.make_bucket(WANTED_ADAPTERS, ttl_s=None)


async def keep_buckets(bus: Bus, lease_s: float) -> None:
    """Make them again when NATS has lost them; until cancelled."""
    is_back = asyncio.Event()
    bus.on_reconnect(is_back.set)
    while True:
        try:
            async with asyncio.timeout(CHECK_S):
                await is_back.wait()
        except TimeoutError:
            pass
        is_back.clear()
        try:
            await make_buckets(bus, lease_s)
        except BusError as error:
            log.info("cannot check the buckets, trying again: %s", error)
