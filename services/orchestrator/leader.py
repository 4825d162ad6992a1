"""Carries out what ``Candidate`` asks for: reads, claims, renews and at the end deletes the leadership entry."""

from __future__ import annotations

import asyncio
import logging

from services.orchestrator.leadership import Candidate, Claim, Read, Renew
from shared.bus.port import BusError, KeyValueStore, WrongRevision
from shared.contracts.control import Leadership
from shared.runtime.clock import Clock

READ_S = 0.5
"""Between two reads of the entry."""
ENTRY_S_MAX = 1.5
"""For one read or write of the entry."""

log = logging.getLogger(__name__)


async def stand_for_leadership(
    candidate: Candidate, store: KeyValueStore[Leadership], clock: Clock, stopping: asyncio.Event
) -> None:
    """Keep ``candidate`` up to date until ``stopping``; then delete the entry, so that a standby leads at once."""
    while not stopping.is_set():
        await _step(candidate, store, clock)
        await _pause(stopping, READ_S)
    if candidate.may_lead(clock.now()):
        candidate.refused()
        try:
            async with asyncio.timeout(ENTRY_S_MAX):
                await store.delete(candidate.role)
        except (BusError, TimeoutError) as error:
            log.warning("cannot delete the leadership entry, it will expire: %s", error)


async def _step(candidate: Candidate, store: KeyValueStore[Leadership], clock: Clock) -> None:
    try:
        async with asyncio.timeout(ENTRY_S_MAX):
            if isinstance(candidate.due(clock.now()), Read):
                found = await store.get(candidate.role)
                candidate.saw(found.value if found else None, found.revision if found else 0)
            requested_at = clock.now()
            match candidate.due(requested_at):
                case Claim() as claim:
                    candidate.written(claim, await store.create(claim.value), requested_at)
                    log.info("leading in term %d", candidate.term)
                case Renew() as renew:
                    candidate.written(renew, await store.update(renew.value, renew.revision), requested_at)
    except WrongRevision:
        candidate.refused()
    except (BusError, TimeoutError) as error:
        # The lease goes on meanwhile. When it ends, this orchestrator stops leading by itself.
        log.warning("cannot reach the leadership entry: %s", error or "timed out")


async def _pause(stopping: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stopping.wait()
    except TimeoutError:
        return
