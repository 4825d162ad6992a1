"""What remembering a decision costs a request: ``python -m bench.bench_explain``.

A fleet of as many workers places requests; their decisions are remembered, ended and told. Microseconds of processor
per decision, best of several rounds, and the memory that each holds.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable

from services.router.placement.choice import asked_of, choice_of
from services.router.placement.decision_log import DecisionLog, Entry, Outcome
from services.router.placement.placement import Placement, PlacementRequest, Policy
from services.router.state.fleet import Fleet
from services.router.telemetry.ttft import Legs, RouterTimes, ttft_parts
from shared.contracts.decisions import TtftParts
from shared.contracts.ids import RequestId, RouterId
from shared.contracts.inference import LegReport
from shared.contracts.workers import Role
from tests.support.fleet_builders import load, record

FLEETS = (2, 8, 100, 1000)
DECISIONS = 2000
ROUNDS = 15
MEASURED = TtftParts(queue_s=0.1, prefill_s=0.2)
PREFILLED = LegReport(queue_s=0.1, prefill_s=0.2, first_token_s=0.301, total_s=0.302)


def make_fleet(workers: int) -> Fleet:
    """Half of it prefill workers, half decode workers."""
    fleet = Fleet(Policy())
    for number in range(workers):
        worker_id, role = f"w{number}", Role.PREFILL if number % 2 else Role.DECODE
        fleet.cluster.record(record(worker_id, role=role), 0.0)
        fleet.cluster.report(load(worker_id, role=role), 0.0)
    return fleet


def best_us(work: Callable[[], object]) -> float:
    """Microseconds of one of ``DECISIONS``."""
    rounds = []
    for _ in range(ROUNDS):
        gc.collect()
        begun = time.thread_time()
        work()
        rounds.append(time.thread_time() - begun)
    return min(rounds) / DECISIONS * 1e6


def measure(workers: int) -> list[str]:
    """A line of the table."""
    fleet = make_fleet(workers)
    need = PlacementRequest(model="m", prompt_tokens=8192)
    places = [fleet.place(need, 0.0) for _ in range(DECISIONS)]
    assert all(isinstance(one, Placement) for one in places)
    entries: list[Entry] = []
    log = DecisionLog(RouterId("router-1-abcdef01"), count_max=DECISIONS, bytes_max=1 << 40)

    def remember() -> None:
        entries.clear()
        for placed in places:
            asked = asked_of(need, RequestId("request-123"), 1.7e9, attempt=1, exact=True)
            entries.append(log.made(asked, choice_of(placed)))

    def end() -> None:
        for entry in entries:
            legs = Legs(answering=PREFILLED, prefill=PREFILLED)
            parts = ttft_parts(0.9, RouterTimes(tokenize_s=0.001), legs)
            entry.outcome = Outcome(outcome="ok", measured=parts, ttft_s=0.9, cached_tokens=3)

    made_us, ended_us = best_us(remember), best_us(end)
    told_us = best_us(lambda: [log.told(entry) for entry in entries])
    held = held_bytes(fleet, need)
    estimate = log.bytes_held / len(log)
    numbers = (
        f"{workers:,}",
        f"{made_us:.1f}",
        f"{ended_us:.1f}",
        f"{told_us:.0f}",
        f"{held:,.0f}",
        f"{estimate:,.0f}",
    )
    return list(numbers)


def held_bytes(fleet: Fleet, need: PlacementRequest) -> float:
    """What a decision holds in memory, with the placement that it refers to."""
    log = DecisionLog(RouterId("router-1-abcdef01"), count_max=DECISIONS, bytes_max=1 << 40)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(DECISIONS):
        asked = asked_of(need, RequestId(f"request-{number}"), 1.7e9 + number, attempt=1, exact=True)
        entry = log.made(asked, choice_of(fleet.place(need, 0.0)))
        entry.outcome = Outcome(outcome="ok", measured=MEASURED, ttft_s=0.9, cached_tokens=3)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return held / DECISIONS


def main() -> None:
    """The table."""
    print("| workers | to remember it, us | to end it, us | to tell it, us | bytes held | bytes counted |")
    print("|---:|---:|---:|---:|---:|---:|")
    for workers in FLEETS:
        print(f"| {' | '.join(measure(workers))} |")


if __name__ == "__main__":
    main()
