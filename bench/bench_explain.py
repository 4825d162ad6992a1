"""What remembering a decision costs a request: ``python -m bench.bench_explain``.

For fleets of several sizes: microseconds of processor time to remember a decision, to complete it when the request
ends, and to render its record; best of several rounds. Also the memory that a decision holds, measured and counted.
"""

from __future__ import annotations

import gc
import secrets
import time
import tracemalloc
from collections.abc import Callable

from services.router.decisions.decision import Decision, DecisionLog
from services.router.placement.fleet import Fleet
from services.router.placement.placement import Placement, PlacementPolicy, PlacementRequest
from services.router.request.timings import Timings
from services.router.telemetry.ttft import Legs, ttft_parts
from shared.contracts.decisions import TtftParts
from shared.contracts.ids import RequestId, RouterId
from shared.contracts.inference import LegReport
from shared.contracts.workers import Role
from tests.support.fleet_builders import load, record

FLEETS = (2, 8, 100, 1000)
DECISIONS = 2000
ROUTER_ID = RouterId("router-1-abcdef01")
ROUNDS = 15
MEASURED = TtftParts(queue_s=0.1, prefill_s=0.2)
PREFILLED = LegReport(queue_s=0.1, prefill_s=0.2, first_token_s=0.301, total_s=0.302)


def make_fleet(workers: int) -> Fleet:
    """Half of it prefill workers, half decode workers."""
    fleet = Fleet(PlacementPolicy())
    for number in range(workers):
        worker_id, role = f"w{number}", Role.PREFILL if number % 2 else Role.DECODE
        fleet.cluster.record(record(worker_id, role=role), 0.0)
        fleet.cluster.report(load(worker_id, role=role), 0.0)
    return fleet


def best_us(work: Callable[[], object]) -> float:
    """Microseconds for one of ``DECISIONS``."""
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
    request = PlacementRequest(model="m", prompt_tokens=8192)
    placements = [fleet.place(request, 0.0) for _ in range(DECISIONS)]
    assert all(isinstance(one, Placement) for one in placements)
    decisions: list[Decision] = []
    log = DecisionLog(ROUTER_ID, lambda: secrets.token_hex(16), lambda: None, bytes_max=1 << 40)

    def remember() -> None:
        decisions.clear()
        for placement in placements:
            decisions.append(log.add(RequestId("request-123"), request, placement, at_unix_s=1.7e9, exact=True))

    def end() -> None:
        for decision in decisions:
            legs = Legs(answering=PREFILLED, prefill=PREFILLED)
            parts = ttft_parts(0.9, Timings(tokenize_s=0.001), legs)
            decision.end("ok", measured=parts, ttft_s=0.9, cached_tokens=3)

    remember_us, end_us = best_us(remember), best_us(end)
    render_us = best_us(lambda: [decision.record(ROUTER_ID) for decision in decisions])
    held = held_bytes(fleet, request)
    counted = log.bytes_held / len(log)
    return [
        f"{workers:,}",
        f"{remember_us:.1f}",
        f"{end_us:.1f}",
        f"{render_us:.0f}",
        f"{held:,.0f}",
        f"{counted:,.0f}",
    ]


def held_bytes(fleet: Fleet, request: PlacementRequest) -> float:
    """Memory of a decision, with the placement that it refers to."""
    log = DecisionLog(ROUTER_ID, lambda: secrets.token_hex(16), lambda: None, bytes_max=1 << 40)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(DECISIONS):
        placement = fleet.place(request, 0.0)
        request_id = RequestId(f"request-{number}")
        decision = log.add(request_id, request, placement, at_unix_s=1.7e9 + number, exact=True)
        decision.end("ok", measured=MEASURED, ttft_s=0.9, cached_tokens=3)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return held / DECISIONS


def main() -> None:
    """The table."""
    print("| workers | remember, µs | complete, µs | render, µs | bytes held | bytes counted |")
    print("|---:|---:|---:|---:|---:|---:|")
    for workers in FLEETS:
        print(f"| {' | '.join(measure(workers))} |")


if __name__ == "__main__":
    main()
