"""The key-value buckets. Every orchestrator keeps them in being; no other party's key permits it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from services.orchestrator.settings import Settings
from shared.bus.outage import Outage
from shared.bus.port import Bus, BusError
from shared.contracts.batches import FILES_BYTES_MAX, FILES_S, RECORDS_BYTES_MAX
from shared.contracts.channels import (
    BATCHES,
    DEFAULT_MODE,
    FILE_PARTS,
    FILES,
    LEADERSHIP,
    RESPONSES,
    USAGE,
    WANTED_ADAPTERS,
    WANTED_WEIGHTS,
    WORKER_RECORDS,
)
from shared.contracts.routers import RESPONSES_BYTES_MAX, RESPONSES_S
from shared.contracts.usage import LEDGER_BYTES_MAX, LEDGER_DAYS
from shared.contracts.workers import WORKER_RECORD_TTL_S

log = logging.getLogger(__name__)

CHECK_S = 5.0
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFor:
    """How long and how much the buckets keep that need files."""

    usage_days: int = LEDGER_DAYS
    responses_s: float = RESPONSES_S
    responses_bytes_max: int = RESPONSES_BYTES_MAX
    """0: there is no bucket for responses."""
    files_bytes_max: int = FILES_BYTES_MAX
    """0: there are no buckets for files and batches."""

    @classmethod
    def from_settings(cls, settings: Settings) -> KeptFor:
        return cls(
            usage_days=settings.usage_days,
            responses_s=settings.responses_s,
            responses_bytes_max=settings.responses_bytes_max,
            files_bytes_max=settings.files_bytes_max,
        )


async def make_buckets(bus: Bus, lease_s: float, kept: KeptFor = KeptFor()) -> None:
    """Make those that are missing, and put right those that are not as they should be. Raises BusDown."""
    await bus.make_bucket(WORKER_RECORDS, ttl_s=WORKER_RECORD_TTL_S)
    await bus.make_bucket(LEADERSHIP, ttl_s=lease_s)
    await bus.make_bucket(DEFAULT_MODE, ttl_s=None)
    await bus.make_bucket(WANTED_ADAPTERS, ttl_s=None)
    await bus.make_bucket(WANTED_WEIGHTS, ttl_s=None)
    try:  # A disk may be too small for the next ones: requests are served without them.
        await _make_buckets_on_disk(bus, kept)
    except BusError as error:
        log.info("usage, responses or files cannot be kept, trying again: %s", error)


async def _make_buckets_on_disk(bus: Bus, kept: KeptFor) -> None:
    await bus.make_bucket(USAGE, ttl_s=kept.usage_days * DAY_S, file_bytes_max=LEDGER_BYTES_MAX)
    if kept.responses_bytes_max:
        size = kept.responses_bytes_max
        await bus.make_bucket(RESPONSES, ttl_s=kept.responses_s, file_bytes_max=size, drops_oldest=True)
    if kept.files_bytes_max:
        await bus.make_bucket(FILES, ttl_s=FILES_S, file_bytes_max=RECORDS_BYTES_MAX)
        await bus.make_bucket(BATCHES, ttl_s=FILES_S, file_bytes_max=RECORDS_BYTES_MAX)
        await bus.make_bucket(FILE_PARTS, ttl_s=FILES_S, file_bytes_max=kept.files_bytes_max)


async def keep_buckets(bus: Bus, lease_s: float, kept: KeptFor) -> None:
    """Make them again when NATS has lost them; until cancelled."""
    is_back, outage = asyncio.Event(), Outage(log)
    bus.on_reconnect(is_back.set)
    while True:
        try:
            async with asyncio.timeout(CHECK_S):
                await is_back.wait()
        except TimeoutError:
            pass
        is_back.clear()
        try:
            await make_buckets(bus, lease_s, kept)
            outage.over()
        except BusError as error:
            outage.failed("cannot check the buckets", error)
