"""Draining: the worker accepts no new legs and lets running legs finish.

Other workers fetch its hot prefixes, so that conversations find their cache there, and decode engines fetch the KV of
its prefill legs. At the end it publishes a report.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from services.worker.engines.port import Engine
from services.worker.kv_exchange.prefix_copy import CopyTargets, CopyTotals, PrefixCopier, copy_targets
from services.worker.kv_exchange.worker_exchange import WorkerExchange
from services.worker.legs.server import LegServer
from services.worker.settings import Settings
from shared.bus.frame_sender import FrameSender
from shared.bus.port import Bus, BusDown, BusError
from shared.contracts.channels import DRAINED
from shared.contracts.failures import Failure, Reason
from shared.contracts.fleet_orders import DrainWorker, WorkerDrained
from shared.contracts.kv_exchange import unpack_full_hashes
from shared.contracts.workers import WorkerRecord
from shared.runtime.clock import Clock
from shared.runtime.service import Service

log = logging.getLogger("baton.worker")

CHAINS_MAX = 256
"""Hot prefixes that are copied, the hottest first."""
CHAINS_AT_ONCE_MAX = 4
"""Concurrent copies, which bound the blocks pinned here and the share of the network."""
EVACUATE_S_MAX = 10.0
"""Time limit for copying prefixes."""
DEADLINE_S_MAX = 86_400.0
"""The longest time that an order may give running legs."""
FLUSH_S_MAX = 2.0
"""Time limit for the last frames to reach NATS."""
HANDOFF_S_MAX = 3.0
"""Time for decode engines to fetch the KV of finished prefill legs, before this engine ends."""


async def evacuate(
    bus: Bus, clock: Clock, exchange: WorkerExchange, record: WorkerRecord, *, s_max: float = EVACUATE_S_MAX
) -> CopyTotals:
    """Copy the hot prefixes of ``record``'s worker to others, for at most ``s_max`` seconds.

    Never raises for failures of other workers. A prefix that no worker fetched in time is counted as left.
    """
    began = clock.now()
    totals, chains = CopyTotals(), list[list[bytes]]()
    try:
        async with asyncio.timeout(s_max):
            chains = [unpack_full_hashes(chain.hashes) for chain in await exchange.hot_chains(CHAINS_MAX)]
            await exchange.peers.all_read()
            targets = CopyTargets(copy_targets(record, exchange.peers.records))
            copier = PrefixCopier(bus, record, targets, totals, left_s=lambda: began + s_max - clock.now())
            await copier.copy_all(chains, at_once=CHAINS_AT_ONCE_MAX)
    except TimeoutError:
        log.info("evacuation ended at its deadline of %g s", s_max)
    totals.prefixes_left = len(chains) - totals.prefixes
    totals.seconds = clock.now() - began
    return totals


@dataclass(frozen=True, slots=True)
class DrainPlan:
    s_max: float
    """Time for running legs."""
    evacuate: bool = False
    sleeps: bool = False
    """Whether the worker begins anew afterwards, without an engine."""
    ordered: bool = False
    """Whether the orchestrator ordered the drain. Otherwise the process got SIGTERM, as all processes do when the whole
    system stops; then no other worker may be left for its cache.
    """


@dataclass(frozen=True, slots=True)
class DrainDeadline:
    """Running legs have ``s_max`` seconds from ``since`` on."""

    since: float
    s_max: float

    def left_s(self, now: float) -> float:
        """Remaining seconds for legs; never negative."""
        return max(0.0, self.since + self.s_max - now)

    def failure(self) -> Failure:
        """The failure of a leg that did not finish in time."""
        message = f"the worker stopped; the leg had {self.s_max:g} s to finish and did not"
        return Failure(reason=Reason.WORKER_DRAINING, message=message)

    def shortened(self, now: float, s_max: float) -> DrainDeadline:
        """After SIGTERM during a drain: legs get at most ``s_max`` seconds from now on."""
        return self if self.left_s(now) <= s_max else DrainDeadline(now, s_max)


def plan_of(order: DrainWorker, s_max: float) -> DrainPlan:
    """``s_max`` is the worker's own deadline, for an order without one."""
    ordered_s = s_max if order.deadline_s is None else order.deadline_s
    return DrainPlan(s_max=min(max(0.0, ordered_s), DEADLINE_S_MAX), evacuate=order.evacuate, ordered=True)


class Drain:
    """Drains one worker. ``record`` returns the worker's registry record."""

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

    async def run(self, plan: DrainPlan) -> None:
        """Drain, and publish WorkerDrained. Raises EngineDead."""
        clock, legs = self._service.clock, self._server.legs
        deadline = DrainDeadline(since=clock.now(), s_max=plan.s_max)
        if self._exchange is not None:
            self._exchange.refuse_fetches()
        evacuating = asyncio.create_task(self._evacuate(plan), name="evacuate")
        try:  # Copy prefixes while legs still run.
            legs_cut = await self._end_legs(deadline)
            copied = await evacuating
        finally:
            evacuating.cancel()
        if legs:  # Legs that ended during the first pass have added prefixes.
            copied = added(copied, await self._evacuate(plan))
        await self.flush_frames()
        await self._hand_off()
        if self._exchange is not None:
            await self._exchange.release_all()
        await self._report(
            self._drained(plan, copied, legs=legs, legs_cut=legs_cut, seconds=clock.now() - deadline.since)
        )

    def _drained(
        self, plan: DrainPlan, copied: CopyTotals, *, legs: int, legs_cut: int, seconds: float
    ) -> WorkerDrained:
        return WorkerDrained(
            worker_id=self._record().worker_id,
            epoch=self._record().epoch,
            seconds=seconds,
            legs=legs,
            legs_cut=legs_cut,
            prefixes=copied.prefixes,
            prefixes_left=copied.prefixes_left,
            blocks=copied.blocks,
            bytes=copied.bytes,
            evacuation_s=copied.seconds,
            ordered=plan.ordered,
        )

    async def flush_frames(self) -> None:
        """Send the last frames before the process ends."""
        try:
            async with asyncio.timeout(FLUSH_S_MAX):
                await self._sender.close()
                await self._service.bus.flush(FLUSH_S_MAX)
        except (TimeoutError, BusDown) as error:
            log.warning("the last frames may not have been sent: %s", error or "timeout")

    async def _end_legs(self, deadline: DrainDeadline) -> int:
        """Wait for running legs until the deadline, and fail the rest; returns how many. SIGTERM shortens it."""
        stopping = asyncio.ensure_future(self._service.stopping.wait())
        idle = asyncio.ensure_future(self._server.idle(deadline.left_s(self._service.clock.now())))
        try:
            await asyncio.wait([idle, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not idle.done():
                now = self._service.clock.now()
                await self._server.idle(deadline.shortened(now, self._settings.drain_s_max).left_s(now))
        finally:
            for waiting in (idle, stopping):
                waiting.cancel()
        legs = self._server.legs
        self._server.fail_all(deadline.failure())
        return legs

    async def _evacuate(self, plan: DrainPlan) -> CopyTotals:
        if self._exchange is None or not plan.evacuate or self._service.stopping.is_set():
            return CopyTotals()
        return await evacuate(self._service.bus, self._service.clock, self._exchange, self._record())

    async def _hand_off(self) -> None:
        """Wait for decode engines to fetch prefilled KV: until no block is leased or, without an exchange, in use."""
        try:
            async with asyncio.timeout(HANDOFF_S_MAX):
                if self._exchange is not None:
                    await self._exchange.unpinned()
                else:
                    await self._blocks_free()
        except TimeoutError:
            log.info("some prefilled KV was not fetched; its decode engines compute it themselves")

    async def _blocks_free(self) -> None:
        changed = asyncio.Event()
        self._engine.on_load_changed(changed.set)
        while self._engine.load().kv_tokens_used:
            changed.clear()
            await changed.wait()

    async def _report(self, drained: WorkerDrained) -> None:
        try:
            await self._service.bus.publish(DRAINED, drained)
            await self._service.bus.flush(FLUSH_S_MAX)
        except BusError as error:
            log.info("the drain's report was not sent: %s", error or "timeout")


def added(first: CopyTotals, second: CopyTotals) -> CopyTotals:
    """Totals of two passes over the same prefixes. The second pass counts prefixes that the first has copied, too."""
    return CopyTotals(
        prefixes=second.prefixes,
        prefixes_left=second.prefixes_left,
        blocks=first.blocks + second.blocks,
        bytes=first.bytes + second.bytes,
        seconds=first.seconds + second.seconds,
    )
