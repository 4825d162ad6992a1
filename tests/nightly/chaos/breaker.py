"""Causes the faults of a schedule at their times and ends them; records the real times."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

from shared.bus.port import Bus, BusError
from shared.contracts.channels import CHANGE_ROLE, DRAIN
from shared.contracts.fleet_orders import ChangeRole, DrainWorker, OrderTaken
from shared.contracts.ids import WorkerId
from shared.contracts.workers import Role
from tests.nightly.chaos.faults import Fault, Kind, Part
from tests.nightly.chaos.fleet import Fleet
from tests.nightly.chaos.keys import REVOCABLE, STEADY
from tests.nightly.chaos.nats_proxy import Line
from tests.nightly.chaos.outcomes import Happened

T = TypeVar("T")

LOST_SHARE = 0.05
DELAY_S = 0.15
SHAPED_BYTES_PER_S, SHAPED_DELAY_S = 512 * 1024, 0.02
IDLE_CLIENTS = 600
"""More than a router has file descriptors."""
END_S_MAX = 60.0
"""From SIGTERM, or the order to drain, to the end of the process."""
ORDER_S_MAX, ORDER_AGAIN_S, REPLY_S_MAX = 60.0, 0.5, 15.0
"""For an order to be carried out, given again and again: the worker may be starting, and NATS away."""
TAKEN_BEFORE = "it drains already"
"""The answer to an order whose first reply was lost."""
ROLES = {"prefill": Role.DECODE, "decode": Role.PREFILL}


class Breaker:
    """Breaks one fleet. ``now`` are the seconds of the run."""

    def __init__(self, fleet: Fleet, now: Callable[[], float], operator: Bus | None = None) -> None:
        """``operator``: gives orders, for faults that are orders."""
        self.happened: list[Happened] = []
        self.failed: list[str] = []
        """What operators did in vain, in words."""
        self._operator = operator
        self._fleet = fleet
        self._now = now

    async def follow(self, faults: Sequence[Fault], spared: Callable[[Fault], Awaitable[bool]] | None = None) -> None:
        """Each at its time; returns when the last is mended. Those are left out that ``spared`` says must be: on a
        slow machine a process may not be back yet when its like is to fall, or when it is to fall again.
        """
        hit: dict[str, asyncio.Task[Happened]] = {}
        async with asyncio.TaskGroup() as breaking:
            for fault in faults:
                await asyncio.sleep(max(0.0, fault.at_s - self._now()))
                if spared is not None and (_is_hit(hit.get(fault.target)) or await spared(fault)):
                    continue
                hit[fault.target] = breaking.create_task(self.do(fault), name=f"{fault.kind} {fault.target}")

    async def do(self, fault: Fault) -> Happened:
        """One fault from its beginning to its end."""
        began_s = self._now()
        if fault.part in (Part.NATS, Part.NODE):
            await self._break_nats(fault)
        elif fault.kind is Kind.REVOKE:
            await self._revoke(fault)
        elif fault.kind is Kind.KILL:
            await self._kill(fault)
        elif fault.kind is Kind.FREEZE:
            await self._freeze(fault)
        elif fault.kind is Kind.EXHAUST:
            await self._exhaust(fault)
        elif fault.kind in (Kind.RESTART, Kind.DRAIN):
            await self._end_in_order(fault)
        elif fault.kind is Kind.ROLE:
            await self._change_role(fault)
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

    async def _revoke(self, fault: Fault) -> None:
        keys = self._fleet.keys
        assert keys is not None, "clients need no keys here"
        await asyncio.to_thread(keys.write, STEADY)
        await asyncio.sleep(fault.for_s)
        await asyncio.to_thread(keys.write, STEADY, REVOCABLE)

    async def _freeze(self, fault: Fault) -> None:
        actor = self._fleet.actors[fault.target]
        actor.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.for_s)
        finally:
            actor.signal(signal.SIGCONT)

    async def _end_in_order(self, fault: Fault) -> None:
        """Ask the process to end; it must, and with 0. Then start it again."""
        actor = self._fleet.actors[fault.target]
        actor.expect_end()
        if fault.kind is Kind.RESTART:
            actor.signal(signal.SIGTERM)
        else:
            order = DrainWorker(worker_id=WorkerId(fault.target))
            await self._order(lambda bus: bus.ask(DRAIN, order, timeout_s=REPLY_S_MAX), _refusal)
        code = await asyncio.to_thread(actor.ended, END_S_MAX)
        if code not in (0, -signal.SIGTERM):  # It may have begun just now, and not handle signals yet.
            self.failed.append(f"{fault.kind} of {fault.target} ended with {code}:\n{actor.said()}")
            await asyncio.to_thread(actor.kill)
        await asyncio.sleep(fault.for_s)
        actor.start()

    async def _change_role(self, fault: Fault) -> None:
        role = self._fleet.size.roles[fault.target]
        await self._order_role(fault.target, ROLES[role])
        await asyncio.sleep(fault.for_s)
        await self._order_role(fault.target, Role(role))

    async def _order_role(self, worker_id: str, role: Role) -> None:
        order = ChangeRole(worker_id=WorkerId(worker_id), role=role)
        await self._order(lambda bus: bus.ask(CHANGE_ROLE, order, timeout_s=REPLY_S_MAX), lambda done: done.failure)

    async def _order(self, give: Callable[[Bus], Awaitable[T]], refusal: Callable[[T], str]) -> None:
        """Give the order until it is taken."""
        assert self._operator is not None, "nobody gives orders here"
        why, until_s = "", self._now() + ORDER_S_MAX
        while self._now() < until_s:
            try:
                why = refusal(await give(self._operator))
            except BusError as error:
                why = str(error)
            if not why:
                return
            await asyncio.sleep(ORDER_AGAIN_S)
        self.failed.append(f"an order was not carried out in {ORDER_S_MAX:g} s: {why}")

    async def _exhaust(self, fault: Fault) -> None:
        """Hold connections that ask for nothing."""
        where = urlsplit(dict(self._fleet.routers)[fault.target])
        opening = [asyncio.open_connection(where.hostname, where.port) for _ in range(IDLE_CLIENTS)]
        opened = await asyncio.gather(*opening, return_exceptions=True)
        await asyncio.sleep(fault.for_s)
        for one in opened:
            if not isinstance(one, BaseException):
                one[1].transport.abort()

    async def _break_nats(self, fault: Fault) -> None:
        nats = self._fleet.nats if fault.part is Part.NATS else self._fleet.nats.nodes[fault.target]
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
        line.trouble.is_cut = line.trouble.is_silent = False
        line.trouble.lost_share = line.trouble.delay_s = line.trouble.bytes_per_s = 0.0

    async def _set(self, line: Line, kind: Kind) -> None:
        match kind:
            case Kind.LOSE:
                line.trouble.lost_share = LOST_SHARE
            case Kind.DELAY:
                line.trouble.delay_s = DELAY_S
            case Kind.SHAPE:
                line.trouble.bytes_per_s, line.trouble.delay_s = SHAPED_BYTES_PER_S, SHAPED_DELAY_S
            case Kind.VANISH:
                line.trouble.is_silent = True
                line.vanish()
            case Kind.CUT:
                line.trouble.is_cut = True
                await line.cut()


def _refusal(taken: OrderTaken) -> str:
    return "" if taken.refusal == TAKEN_BEFORE else taken.refusal


def _is_hit(fault: asyncio.Task[Happened] | None) -> bool:
    return fault is not None and not fault.done()
