"""Cost of one placement, including the index lookup: ``python -m bench.bench_place``.

Fleets of workers that do both phases, and of prefill and decode workers, busy to different degrees; prompts of 512
blocks, of which each worker holds none or some. CPU time of the calling thread, in C and then as the specification in
Python does it; calls of functions as a profiler counts them; and the cost of visiting each worker once in Python. A shared
core can be slower for a while: the last column is p99/p50 of constant work, done in turns with the placements in C.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from statistics import median

from services.router.placement.native import IS_COMPILED
from services.router.placement.placement import Placement, PlacementPolicy, PlacementRequest
from services.router.placement.placer import CostPlacer
from services.router.service import tune_garbage_collection
from services.router.state.block_table import block_table
from services.router.state.cluster_view import ClusterView
from services.router.state.prefix_index import PrefixIndex
from services.router.state.worker_view import Sent
from shared.contracts.ids import WorkerId
from shared.contracts.kv_events import KvSnapshot, pack_hashes
from shared.contracts.workers import Role
from tests.support.fleet_builders import load, record

BLOCKS, BLOCK_TOKENS = 512, 32
PLACEMENTS = {True: 1000, False: 200}
"""By form: in C, and in Python, which takes 13 ms for one placement on 1,000 workers."""
SAME_WORK = 20_000
SIZES = (2, 4, 16, 100, 1000)
FLEETS = {"do both": (Role.BOTH,), "prefill and decode": (Role.PREFILL, Role.DECODE)}


def fleet(size: int, roles: tuple[Role, ...]) -> tuple[ClusterView, PrefixIndex]:
    """So many workers, some of them holding a part of the prompt."""
    chance = random.Random(size)
    cluster, index = ClusterView(), PrefixIndex(block_table())
    for number in range(size):
        worker_id, role = f"w{number}", roles[number % len(roles)]
        cluster.record(record(worker_id, role=role, connector="baton-1"), 0.0)
        busy = {"waiting_tokens": chance.randrange(5000), "running": chance.randrange(16), "kv_tokens_total": 320_000}
        cluster.report(load(worker_id, role=role, **busy), 0.0)
        index.join(WorkerId(worker_id), 1)
        held = chance.choice((0, 0, 0, chance.randrange(BLOCKS)))
        snapshot = KvSnapshot(worker_id=worker_id, epoch=1, seq=1, hashes=pack_hashes(range(1, held + 1)))
        index.restore(snapshot)
    return cluster, index


def calls(placer: CostPlacer, request: PlacementRequest) -> int:
    """Functions that one placement calls, Python's and others."""
    count = 0

    def on_call(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(on_call)
    placer.place(request, 0.0)
    sys.setprofile(None)
    return count


def timed_us(work: Callable[[], object]) -> float:
    began_s = time.thread_time()
    work()
    return (time.thread_time() - began_s) * 1e6


def place_us(cluster: ClusterView, placer: CostPlacer, request: PlacementRequest) -> float:
    """Microseconds to place a request, which then runs and ends."""
    began_s = time.thread_time()
    placement = placer.place(request, 0.0)
    took_us = (time.thread_time() - began_s) * 1e6
    assert isinstance(placement, Placement)
    sent = Sent(0.0, placement.uncached_tokens, placement.context_tokens)
    cluster.leg_started(placement.decode.record.worker_id, sent)
    cluster.leg_ended(placement.decode.record.worker_id, sent, placement.context_tokens)
    return took_us


def measure(size: int, roles: tuple[Role, ...]) -> list[str]:
    """A line of the table."""
    cluster, index = fleet(size, roles)
    forms = (True, False) if IS_COMPILED else (False,)
    placers = {form: CostPlacer(cluster, index, PlacementPolicy(), compiled=form) for form in forms}
    request = PlacementRequest(model="m", prompt_tokens=BLOCKS * BLOCK_TOKENS + 5, hashes=tuple(range(1, BLOCKS + 1)))
    took_us: dict[bool, list[float]] = {form: [] for form in forms}
    scan_us, same_us = [], []
    tune_garbage_collection()
    for form, placer in placers.items():
        for number in range(PLACEMENTS[form]):
            took_us[form].append(place_us(cluster, placer, request))
            if form is forms[0]:
                same_us.append(timed_us(lambda: sum(range(SAME_WORK))))
            if number % 20 == 0:
                scan_us.append(timed_us(lambda: sum(view.own.tokens for view in cluster.workers.values())))
    cells = []
    for form in (True, False):
        of_form = sorted(took_us.get(form, ()))
        cells += [f"{of_form[len(of_form) * share // 100]:.0f}" if of_form else "" for share in (50, 99)]
        cells.append(f"{calls(placers[form], request)}" if of_form else "")
    same_us.sort()
    return [*cells, f"{median(scan_us):.1f}", f"{same_us[len(same_us) * 99 // 100] / median(same_us):.2f}"]


def main() -> None:
    print(
        "| workers | that | in C, µs p50 | p99 | calls | Python, µs p50 | p99 | calls | one look at each, µs | p99 / p50 of the same work |"
    )
    print(f"|---:|---|{'---:|' * 8}")
    for size in SIZES:
        for label, roles in FLEETS.items():
            print(f"| {size} | {label} | {' | '.join(measure(size, roles))} |", flush=True)


if __name__ == "__main__":
    main()
