"""Does what ``core.leadership`` asks for: looks at the seat, claims it, renews it, and gives it back at the end."""

from __future__ import annotations

import asyncio
import logging

from services.orchestrator.leadership.leadership import Candidate, Claim, Look, Renew
from shared.bus.port import BusError, KeyValueStore, WrongRevision
from shared.contracts.control import Leadership
from shared.runtime.clock import Clock

LOOK_S = 0.5
"""Between two looks at the seat."""
SEAT_S_MAX = 1.5
"""For one read or write of the seat."""

log = logging.getLogger(__name__)


async def stand_for_leadership(
    candidate: Candidate, seat: KeyValueStore[Leadership], clock: Clock, stopping: asyncio.Event
) -> None:
    """Keep ``candidate`` up to date until ``stopping``; then leave the seat to the next at once."""
    while not stopping.is_set():
        await _step(candidate, seat, clock)
        await _pause(stopping, LOOK_S)
    if candidate.may_lead(clock.now()):
        candidate.refused()
        try:
            async with asyncio.timeout(SEAT_S_MAX):
                await seat.delete(candidate.role)
        except (BusError, TimeoutError) as error:
            log.warning("could not leave the seat, it expires by itself: %s", error)


async def _step(candidate: Candidate, seat: KeyValueStore[Leadership], clock: Clock) -> None:
    try:
        async with asyncio.timeout(SEAT_S_MAX):
            if isinstance(candidate.due(clock.now()), Look):
                found = await seat.get(candidate.role)
                candidate.saw(found.value if found else None, found.revision if found else 0)
            asked_at = clock.now()
            match candidate.due(asked_at):
                case Claim() as claim:
                    candidate.written(claim, await seat.create(claim.value), asked_at)
                    log.info("leading in term %d", candidate.term)
                case Renew() as renew:
                    candidate.written(renew, await seat.update(renew.value, renew.revision), asked_at)
    except WrongRevision:
        candidate.refused()
    except (BusError, TimeoutError) as error:
        # The lease runs on meanwhile; when it ends this one falls silent by itself.
        log.warning("cannot reach the seat: %s", error or "timed out")


async def _pause(stopping: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stopping.wait()
    except TimeoutError:
        return
