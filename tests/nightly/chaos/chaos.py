"""One run: a fleet under load and faults; after the last fault it must recover, and all results are checked."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from shared.runtime.settings import load_common
from tests.nightly.chaos.batches import BatchClients
from tests.nightly.chaos.breaker import Breaker
from tests.nightly.chaos.faults import MENU, Fault, Rhythm, Row, schedule
from tests.nightly.chaos.fleet import OTHER, REQUEST_S_MAX, Fleet, Size, running_fleet
from tests.nightly.chaos.oracle import Oracle
from tests.nightly.chaos.outcomes import BatchOutcome, Happened, Limits, Outcome, batch_violations, failures, violations
from tests.nightly.chaos.trace import Ask, Shape, make_batches, make_trace
from tests.nightly.chaos.traffic import Traffic
from tests.nightly.chaos.witness import Witness, witness_of

START_S_MAX = 600.0
SETTLE_S_MAX = 90.0
"""From the last answer until everything is as if nothing had been: leases end, silence is noticed, indexes are exact."""
DEADLINE_SLACK_S = 8.0
"""What a client allows beside the request's budget: the router's own last look, and a machine that stands still."""
TOLD_MAX = 60
CARDS = 2
"""How often conversations with the second model, and with the adapter, come where there are such."""
LIMITS = Limits(deadline_s=REQUEST_S_MAX + DEADLINE_SLACK_S)


@dataclass(kw_only=True)
class Report:
    """What came of a run."""

    asks: Sequence[Ask]
    outcomes: Sequence[Outcome]
    batches: Sequence[BatchOutcome]
    happened: Sequence[Happened]
    violations: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    unsettled: list[str] = field(default_factory=list)
    settled_s: float = 0.0

    def broken_promises(self) -> list[str]:
        """Everything that breaks a promise."""
        return [*self.violations, *self.deaths, *self.unsettled]

    def summary(self) -> str:
        """For a person."""
        kinds = Counter(f"{one.fault.part} {one.fault.kind}" for one in self.happened)
        ends = Counter(map(_end, self.outcomes))
        paths = Counter(f"{ask.path} of {ask.model}" for ask in self.asks)
        lines = [
            f"{len(self.asks)} requests: " + ", ".join(f"{end} {count}" for end, count in sorted(ends.items())),
            "asked: " + ", ".join(f"{path} {count}" for path, count in sorted(paths.items())),
            f"{sum(one.reused for one in self.outcomes)} on kept connections",
            *(one.describe() for one in self.batches),
            f"{len(self.happened)} faults: " + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())),
            f"settled after {self.settled_s:.1f} s" if not self.unsettled else "never settled",
            f"{len(self.broken_promises())} broken promises",
            *self.broken_promises()[:TOLD_MAX],
            *(["not answered:", *self.failures[:TOLD_MAX]] if self.failures else []),
            *(f"{one.began_s:.2f}..{one.ended_s:.2f} s: {one.fault.kind} {one.fault.target}" for one in self.happened),
        ]
        return "\n".join(lines)


def _end(outcome: Outcome) -> str:
    if outcome.is_answered:
        return str(outcome.status)
    return outcome.code or ("left" if outcome.left else "cut")


class Run:
    """A fleet that is ready, with its witness; each ``break_it`` is one trace under one schedule."""

    def __init__(self, fleet: Fleet, witness: Witness, oracle: Oracle) -> None:
        self.fleet = fleet
        self.witness = witness
        self.oracle = oracle

    async def ready(self) -> None:
        """Until everybody is there and nothing is wrong."""
        left = await self.witness.settled(START_S_MAX)
        assert not left, "\n".join([*left, *self.fleet.deaths()])

    async def break_it(self, shape: Shape, faults: Sequence[Fault], *, always: bool = True) -> Report:
        """The whole story; unless ``always``, of each kind of process enough are left, however slow the machine."""
        size = self.fleet.size
        shape = replace(shape, other_cards=bool(size.other) * CARDS, adapter_cards=size.adapter * CARDS)
        limits = replace(LIMITS, other_workers=[name for name, role in size.roles.items() if role == OTHER])
        asks, batches = make_trace(shape, self.oracle), make_batches(shape, self.oracle)
        began = time.monotonic()

        def now() -> float:
            return time.monotonic() - began

        traffic, breaker = Traffic(self.fleet.routers, now), Breaker(self.fleet, now, self.witness.bus)
        batch_clients = BatchClients(traffic, now)
        try:
            async with asyncio.TaskGroup() as acts:
                acts.create_task(traffic.send_all(asks), name="traffic")
                acts.create_task(batch_clients.send_all(batches), name="batches")
                acts.create_task(breaker.follow(faults, None if always else self.witness.spares), name="breaker")
        finally:
            await traffic.close()
            await batch_clients.close()
        ended_s = now()
        unsettled = await self.witness.settled(SETTLE_S_MAX)
        return Report(
            asks=asks,
            outcomes=traffic.outcomes,
            batches=batch_clients.outcomes,
            happened=breaker.happened,
            violations=[
                *violations(asks, traffic.outcomes, breaker.happened, limits),
                *batch_violations(batches, batch_clients.outcomes, breaker.happened, limits),
            ],
            failures=failures(traffic.outcomes),
            deaths=[*self.fleet.deaths(), *breaker.failed],
            unsettled=unsettled,
            settled_s=now() - ended_s,
        )

    async def chaos(self, shape: Shape, every_s: float, menu: Sequence[Row] = MENU) -> Report:
        """With faults that follow from the shape's seed."""
        rhythm = Rhythm(seconds=shape.seconds, every_s=every_s)
        return await self.break_it(shape, schedule(shape.seed, self.fleet.cast(), rhythm, menu), always=False)


@asynccontextmanager
async def opened_run(size: Size, folder: Path) -> AsyncIterator[Run]:
    """A fleet of that size, ready."""
    oracle = await asyncio.to_thread(make_oracle)
    async with running_fleet(size, folder) as fleet, witness_of(fleet) as witness:
        run = Run(fleet, witness, oracle)
        await run.ready()
        yield run


def make_oracle() -> Oracle:
    """From the same tokenizer as the workers."""
    return Oracle(Path(load_common().cache_dir))
