"""Causes the faults of a schedule at their times and ends them; records the real times."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence

from tests.nightly.chaos.faults import Fault, Kind, Part
from tests.nightly.chaos.fleet import Fleet
from tests.nightly.chaos.nats_proxy import Line
from tests.nightly.chaos.outcomes import Happened

LOST_SHARE = 0.05
DELAY_S = 0.15


class Breaker:
    """Breaks one fleet. ``now`` are the seconds of the run."""

    def __init__(self, fleet: Fleet, now: Callable[[], float]) -> None:
        self.happened: list[Happened] = []
        self._fleet = fleet
        self._now = now

    async def follow(self, faults: Sequence[Fault], spared: Callable[[Fault], Awaitable[bool]] | None = None) -> None:
        """Each at its time; returns when the last is mended. Those are left out that ``spared`` says must be: on a
        slow machine a process may not be back yet when its like is to fall.
        """
        async with asyncio.TaskGroup() as breaking:
            for fault in faults:
                await asyncio.sleep(max(0.0, fault.at_s - self._now()))
                if spared is not None and await spared(fault):
                    continue
                breaking.create_task(self.do(fault), name=f"{fault.kind} {fault.target}")

    async def do(self, fault: Fault) -> Happened:
        """One fault from its beginning to its end."""
        began_s = self._now()
        if fault.part is Part.NATS:
            await self._break_nats(fault)
        elif fault.kind is Kind.KILL:
            await self._kill(fault)
        elif fault.kind is Kind.FREEZE:
            await self._freeze(fault)
        else:
            await self._trouble(fault)
        happened = Happened(fault=fault, began_s=began_s, ended_s=self._now())
        self.happened.append(happened)
        return happened

    async def _kill(self, fault: Fault) -> None:
        actor = self._fleet.actors[fault.target]
        await asyncio.to_thread(actor.kill)
        await asyncio.sleep(fault.for_s)
        actor.start()

    async def _freeze(self, fault: Fault) -> None:
        actor = self._fleet.actors[fault.target]
        actor.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.for_s)
        finally:
            actor.signal(signal.SIGCONT)

    async def _break_nats(self, fault: Fault) -> None:
        nats = self._fleet.nats
        if fault.kind is Kind.FREEZE:
            nats.pause()
            await asyncio.sleep(fault.for_s)
            nats.resume()
            return
        await asyncio.to_thread(nats.kill)
        if fault.kind is Kind.FORGET:
            nats.lose_storage()
        await asyncio.sleep(fault.for_s)
        await asyncio.to_thread(nats.start)

    async def _trouble(self, fault: Fault) -> None:
        line = self._fleet.actors[fault.target].line
        assert line is not None, f"{fault.target} has no line of its own"
        await self._set(line, fault.kind)
        await asyncio.sleep(fault.for_s)
        line.trouble.is_cut = False
        line.trouble.lost_share = line.trouble.delay_s = 0.0

    async def _set(self, line: Line, kind: Kind) -> None:
        match kind:
            case Kind.LOSE:
                line.trouble.lost_share = LOST_SHARE
            case Kind.DELAY:
                line.trouble.delay_s = DELAY_S
            case Kind.CUT:
                line.trouble.is_cut = True
                await line.cut()
