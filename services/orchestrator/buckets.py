"""The key-value buckets. Every orchestrator keeps them in being; no other party's key permits it."""

from __future__ import annotations

import asyncio
import logging

from shared.bus.port import Bus, BusError
from shared.contracts.channels import DEFAULT_MODE, LEADERSHIP, USAGE, WANTED_ADAPTERS, WORKER_RECORDS
from shared.contracts.usage import LEDGER_BYTES_MAX, LEDGER_DAYS
from shared.contracts.workers import WORKER_RECORD_TTL_S

log = logging.getLogger(__name__)

CHECK_S = 5.0
DAY_S = 86_400.0


async def make_buckets(bus: Bus, lease_s: float, usage_days: int = LEDGER_DAYS) -> None:
    """Make those that are missing, and put right those that are not as they should be. Raises BusDown."""
    await bus.make_bucket(WORKER_RECORDS, ttl_s=WORKER_RECORD_TTL_S)
    await bus.make_bucket(LEADERSHIP, ttl_s=lease_s)
    await bus.make_bucket(DEFAULT_MODE, ttl_s=None)
    await bus.make_bucket(WANTED_ADAPTERS, ttl_s=None)
    try:
        await bus.make_bucket(USAGE, ttl_s=usage_days * DAY_S, kept_bytes_max=LEDGER_BYTES_MAX)
    except BusError as error:  # A disk may be too small for the ledger: requests are served without it.
        log.info("the usage ledger cannot be kept, trying again: %s", error)


async def keep_buckets(bus: Bus, lease_s: float, usage_days: int) -> None:
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
            await make_buckets(bus, lease_s, usage_days)
        except BusError as error:
            log.info("cannot check the buckets, trying again: %s", error)
