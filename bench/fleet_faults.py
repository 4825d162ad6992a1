"""Faults and changes of a fleet while streams run, and their measurements, for ``bench_fleet``."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import httpx

from shared.bus.nats_bus import connect_nats
from shared.bus.port import Bus, BusError, Envelope
from shared.contracts.channels import CHANGE_ROLE, DESCRIBE_FLEET, DRAIN, DRAINED, WORKER_LOST
from shared.contracts.fleet_orders import ChangeRole, DrainWorker, WorkerDrained
from shared.contracts.ids import WorkerId
from shared.contracts.workers import DescribeFleet, Role, WorkerLost
from tests.nightly.chaos.breaker import Breaker
from tests.nightly.chaos.chaos import LIMITS, Run
from tests.nightly.chaos.faults import Fault, Kind, Part
from tests.nightly.chaos.fleet import PACE
from tests.nightly.chaos.outcomes import violations
from tests.nightly.chaos.trace import Ask
from tests.nightly.chaos.traffic import Traffic

STREAMS, STREAM_TOKENS = 12, 300
PROMPT_TOKENS = 300
UNDER_WAY_S = 2.0
"""Until all streams run."""
AGAIN_S_MAX = 60.0
CHECK_S = 0.02
ASK_S_MAX = 0.5
ORDER_S_MAX = 60.0
NEVER = -1.0


@dataclass(kw_only=True)
class Seen:
    """Measurements of one fault or change; -1: not applicable."""

    noticed_s: float = NEVER
    silence_s: float = NEVER
    as_before_s: float = NEVER
    streams: int = 0
    hit: int = 0
    failed: int = 0
    note: str = ""


class FleetFaults:
    """Each method causes one fault or change."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._began = time.monotonic()
        self._breaker = Breaker(run.fleet, self._now)
        self._numbers = itertools.count(1)
        self._lost: dict[str, float] = {}
        self._drained: dict[str, WorkerDrained] = {}
        self._http = httpx.AsyncClient(timeout=ASK_S_MAX, trust_env=False)
        self._bus: Bus

    async def open(self) -> None:
        """Follow the announcements about workers."""
        self._bus = await connect_nats(self._run.fleet.nats.url, name="bench")
        await self._bus.subscribe(WORKER_LOST, self._on_lost)
        await self._bus.subscribe(DRAINED, self._on_drained)

    async def close(self) -> None:
        await self._http.aclose()
        await self._bus.close()

    async def break_worker(self, kind: Kind, for_s: float) -> Seen:
        """Kill the worker with the most streams."""
        return await self._break(
            lambda: Fault(at_s=0, kind=kind, part=Part.WORKER, target=self._busiest(), for_s=for_s)
        )

    async def kill_nats(self, away_s: float, *, forget: bool) -> Seen:
        kind = Kind.FORGET if forget else Kind.KILL
        return await self._break(lambda: Fault(at_s=0, kind=kind, part=Part.NATS, target="nats", for_s=away_s))

    async def kill_router(self) -> Seen:
        """Kill a router; its streams are lost with their connections."""
        return await self._break(lambda: Fault(at_s=0, kind=Kind.KILL, part=Part.ROUTER, target="router-1", for_s=0.0))

    async def kill_leader(self) -> Seen:
        """Until the standby answers."""
        leader = await self._leader()
        fault = Fault(at_s=0, kind=Kind.KILL, part=Part.ORCHESTRATOR, target=leader, for_s=10.0)

        async def another() -> bool:
            return (await self._leader()) not in ("", leader)

        return await self._break(lambda: fault, noticed=another)

    async def add_worker(self) -> Seen:
        """Add a decode worker, and wait for its first request."""
        name = f"decode-{100 + next(self._numbers)}"
        fleet = self._run.fleet
        settings = {**PACE, "WORKER_WORKER_ID": name, "WORKER_ROLE": "decode"}
        async with AsyncExitStack() as lines:
            actor = await fleet.add("worker", name, settings, lines)
            traffic = Traffic(fleet.routers, self._now)
            sending = asyncio.create_task(self._send_short(traffic))
            began = self._now()
            actor.start()
            try:
                ready_s = await self._until(lambda: _so(name in self._run.witness.ready()), began)
                first_s = await self._until(
                    lambda: _so(any(o.decode_worker == name for o in traffic.outcomes)), began + ready_s
                )
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                await traffic.close()
                await self._leave(name)
                del fleet.actors[name]
        failed = sum(not outcome.is_answered for outcome in traffic.outcomes)
        return Seen(noticed_s=ready_s, failed=failed, note=f"has answered a request {first_s:.1f} s later")

    async def change_role(self) -> Seen:
        """Change a role and back, with streams running."""
        seconds: list[float] = []

        async def change() -> str:
            for role in (Role.BOTH, Role.DECODE):
                order = ChangeRole(worker_id=WorkerId("decode-4"), role=role)
                done = await self._bus.ask(CHANGE_ROLE, order, timeout_s=ORDER_S_MAX)
                assert not done.failure, done.failure
                seconds.append(done.seconds)
            return "decode-4"

        seen = await self._beside_streams(change)
        seen.noticed_s = max(seconds)
        return seen

    async def drain_worker(self) -> Seen:
        """Drain a worker with streams; start it again afterwards."""
        name = ""

        async def leave() -> str:
            nonlocal name
            name = self._busiest()
            await self._leave(name)
            return name

        seen = await self._beside_streams(leave)
        told = self._drained.pop(name)
        seen.noticed_s = told.seconds
        seen.note = f"{told.prefixes} prefixes moved, {told.prefixes_left} left, in {told.evacuation_s:.1f} s"
        actor = self._run.fleet.actors[name]
        await asyncio.to_thread(actor.kill)
        actor.start()
        return seen

    async def _leave(self, name: str) -> None:
        order = DrainWorker(worker_id=WorkerId(name))
        self._run.fleet.actors[name].expect_end()
        taken = await self._bus.ask(DRAIN, order, timeout_s=ORDER_S_MAX)
        assert not taken.refusal, taken.refusal
        await self._until(lambda: _so(name in self._drained), self._now())

    async def _break(self, choose: Callable[[], Fault], noticed: Callable[[], Awaitable[bool]] | None = None) -> Seen:
        self._lost.clear()
        times: dict[str, float] = {}

        async def do() -> str:
            fault = choose()
            began = self._now()
            doing = asyncio.create_task(self._breaker.do(fault))
            if noticed is not None:
                times["noticed"] = await self._until(noticed, began)
            over = (await doing).ended_s
            times["as_before"] = await self._until(self._is_whole, over)
            if noticed is None and fault.target in self._lost:
                times["noticed"] = self._lost[fault.target] - began
            return fault.target

        seen = await self._beside_streams(do)
        seen.as_before_s = times["as_before"]
        seen.noticed_s = times.get("noticed", NEVER)
        return seen

    async def _is_whole(self) -> bool:
        return not await self._run.witness.incomplete()

    def _busiest(self) -> str:
        return self._run.witness.busiest()

    async def _beside_streams(self, do: Callable[[], Awaitable[str]]) -> Seen:
        """Run many long streams and call ``do`` meanwhile, which returns the worker it hit; checks all answers."""
        asks = [self._ask(STREAM_TOKENS) for _ in range(STREAMS)]
        traffic, before = Traffic(self._run.fleet.routers, self._now), len(self._breaker.happened)
        try:
            sending = [asyncio.create_task(traffic.send(ask)) for ask in asks]
            await asyncio.sleep(UNDER_WAY_S)
            target = await do()
            outcomes = await asyncio.gather(*sending)
        finally:
            await traffic.close()
        wrong = violations(asks, outcomes, self._breaker.happened[before:], LIMITS)
        assert not wrong, wrong
        hit = [outcome for outcome in outcomes if target in ("nats", outcome.decode_worker, outcome.router)]
        answered = [outcome.gap_s for outcome in hit if outcome.is_answered]
        return Seen(
            silence_s=max(answered, default=NEVER),
            streams=len(outcomes),
            hit=len(hit),
            failed=sum(not outcome.is_answered for outcome in outcomes),
        )

    async def _send_short(self, traffic: Traffic) -> None:
        async with asyncio.TaskGroup() as clients:
            for _ in range(STREAMS):
                clients.create_task(self._send_on(traffic))

    async def _send_on(self, traffic: Traffic) -> None:
        while True:
            await traffic.send(self._ask(10))

    def _ask(self, tokens: int) -> Ask:
        number = next(self._numbers)
        prompt = tuple(10 + (number * 7919 + n) % 900 for n in range(PROMPT_TOKENS))
        oracle = self._run.oracle
        answer = oracle.text(oracle.answer(prompt, tokens))
        return Ask(
            number=number, at_s=0, conversation=number, prompt=prompt, max_tokens=tokens, stream=True, answer=answer
        )

    async def _leader(self) -> str:
        try:
            return (await self._bus.ask(DESCRIBE_FLEET, DescribeFleet(), timeout_s=ASK_S_MAX)).leader
        except BusError:
            return ""

    async def _until(self, promise: Callable[[], Awaitable[bool]], since: float) -> float:
        deadline = self._now() + AGAIN_S_MAX
        while not await promise():
            assert self._now() < deadline, "not in time"
            await asyncio.sleep(CHECK_S)
        return self._now() - since

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _on_lost(self, lost: WorkerLost, _envelope: Envelope) -> None:
        self._lost.setdefault(lost.worker_id, self._now())

    def _on_drained(self, drained: WorkerDrained, _envelope: Envelope) -> None:
        self._drained[drained.worker_id] = drained


async def _so(is_so: bool) -> bool:
    return is_so
