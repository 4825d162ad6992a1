"""How a worker drains: it takes no new legs, running legs may finish, its hot prefixes and its prompts' KV go to other
workers, and it reports how that went.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from services.worker.engines.port import Engine
from services.worker.kv_exchange.prefix_copy import CopyTotals
from services.worker.kv_exchange.worker_exchange import WorkerExchange
from services.worker.legs.server import LegServer
from services.worker.lifecycle.evacuation import evacuate
from services.worker.settings import Settings
from shared.bus.frame_sender import FrameSender
from shared.bus.port import BusDown, BusError
from shared.contracts.channels import DRAINED
from shared.contracts.failures import Failure, Reason
from shared.contracts.fleet_orders import DrainWorker, WorkerDrained
from shared.contracts.workers import WorkerRecord
from shared.runtime.service import Service

DEADLINE_S_MAX = 86_400.0
"""That an order may give running legs."""


@dataclass(frozen=True, slots=True)
class DrainPlan:
    """Why and how the worker leaves."""

    s_max: float
    """For running legs."""
    evacuate: bool = False
    ordered: bool = False
    """Somebody told this worker to go; otherwise its process was told to end, as all of them are when a system stops,
    and nobody stays who could take its cache."""


@dataclass(frozen=True, slots=True)
class DrainDeadline:
    """Began at ``since``; legs get ``s_max`` seconds."""

    since: float
    s_max: float

    def left_s(self, now: float) -> float:
        """Seconds that legs still have; never negative."""
        return max(0.0, self.since + self.s_max - now)

    def verdict(self) -> Failure:
        """What a leg is told that did not finish in time."""
        message = f"the worker stopped; the leg had {self.s_max:g} s to finish and did not"
        return Failure(reason=Reason.WORKER_DRAINING, message=message)


def ordered(order: DrainWorker, s_max: float) -> DrainPlan:
    """What the order means; ``s_max`` is the worker's own deadline."""
    asked = s_max if order.deadline_s is None else order.deadline_s
    return DrainPlan(s_max=min(max(0.0, asked), DEADLINE_S_MAX), evacuate=order.evacuate, ordered=True)


def hurried(draining: DrainDeadline, now: float, s_max: float) -> DrainDeadline:
    """The process was told to end while it drained: legs get no more than they would have got for that alone."""
    return draining if draining.left_s(now) <= s_max else DrainDeadline(now, s_max)


log = logging.getLogger("baton.worker")

FLUSH_S_MAX = 2.0
"""For the last frames to reach NATS."""
HANDOFF_S_MAX = 3.0
"""For decode engines to fetch the KV of prefill legs that have ended, before this engine goes."""


class Drain:
    """See the module. ``record`` answers what this worker has registered."""

    def __init__(
        self,
        service: Service,
        settings: Settings,
        engine: Engine,
        exchange: WorkerExchange | None,
        server: LegServer,
        sender: FrameSender,
        record: Callable[[], WorkerRecord],
    ) -> None:
        self._service = service
        self._settings = settings
        self._engine = engine
        self._exchange = exchange
        self._server = server
        self._sender = sender
        self._record = record

    async def leave(self, departure: DrainPlan) -> None:
        """From the first refused leg to the last word. Raises EngineDead."""
        clock, legs = self._service.clock, self._server.legs
        draining = DrainDeadline(since=clock.now(), s_max=departure.s_max)
        if self._exchange is not None:
            self._exchange.take_no_more()
        evacuating = asyncio.create_task(self._evacuate(departure), name="evacuate")
        try:  # What nobody uses just now goes while legs still run.
            legs_cut = await self._end_legs(draining)
            gone = await evacuating
        finally:
            evacuating.cancel()
        if legs:  # What they have just written is hot, too.
            gone = together(gone, await self._evacuate(departure))
        await self.farewell()
        await self._hand_over()
        if self._exchange is not None:
            await self._exchange.release_all()
        await self._say(
            WorkerDrained(
                worker_id=self._record().worker_id,
                epoch=self._record().epoch,
                seconds=clock.now() - draining.since,
                legs=legs,
                legs_cut=legs_cut,
                prefixes=gone.prefixes,
                prefixes_left=gone.prefixes_left,
                blocks=gone.blocks,
                bytes=gone.bytes,
                evacuation_s=gone.seconds,
                ordered=departure.ordered,
            )
        )

    async def farewell(self) -> None:
        """The last frames leave before the process does."""
        try:
            async with asyncio.timeout(FLUSH_S_MAX):
                await self._sender.close()
                await self._service.bus.flush(FLUSH_S_MAX)
        except (TimeoutError, BusDown) as error:
            log.warning("the last frames may not have been sent: %s", error or "time is up")

    async def _end_legs(self, draining: DrainDeadline) -> int:
        """They end, or their time does; answers how many had to be cut. An end of the process that is wanted meanwhile
        leaves them less of it.
        """
        stopping = asyncio.ensure_future(self._service.stopping.wait())
        idle = asyncio.ensure_future(self._server.idle(draining.left_s(self._service.clock.now())))
        try:
            await asyncio.wait([idle, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not idle.done():
                now = self._service.clock.now()
                await self._server.idle(hurried(draining, now, self._settings.drain_s_max).left_s(now))
        finally:
            for waiting in (idle, stopping):
                waiting.cancel()
        legs = self._server.legs
        self._server.fail_all(draining.verdict())
        return legs

    async def _evacuate(self, departure: DrainPlan) -> CopyTotals:
        if self._exchange is None or not departure.evacuate or self._service.stopping.is_set():
            return CopyTotals()
        bus, clock, s_max = self._service.bus, self._service.clock, self._settings.evacuate_s_max
        return await evacuate(bus, clock, self._exchange, self._record(), s_max=s_max)

    async def _hand_over(self) -> None:
        """KV that decode engines are about to fetch is leased or, without an exchange, in use without a leg."""
        try:
            async with asyncio.timeout(HANDOFF_S_MAX):
                if self._exchange is not None:
                    await self._exchange.handed_over()
                else:
                    await self._blocks_free()
        except TimeoutError:
            log.info("some prefilled KV was not fetched; its decode engines will compute it themselves")

    async def _blocks_free(self) -> None:
        changed = asyncio.Event()
        self._engine.on_load_changed(changed.set)
        while self._engine.load().kv_blocks_used:
            changed.clear()
            await changed.wait()

    async def _say(self, drained: WorkerDrained) -> None:
        try:
            await self._service.bus.publish(DRAINED, drained)
            await self._service.bus.flush(FLUSH_S_MAX)
        except BusError as error:
            log.info("nobody hears how it left: %s", error or "time is up")


def together(first: CopyTotals, second: CopyTotals) -> CopyTotals:
    """Two passes over the same prefixes: the second one finds moved what the first has moved."""
    return CopyTotals(
        prefixes=second.prefixes,
        prefixes_left=second.prefixes_left,
        blocks=first.blocks + second.blocks,
        bytes=first.bytes + second.bytes,
        seconds=first.seconds + second.seconds,
    )
