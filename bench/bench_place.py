"""Cost of one placement, including the index lookup: ``python -m bench.bench_place``.

Fleets of workers that do both phases, and of prefill and decode workers, busy to different degrees; prompts of 512
blocks, of which each worker holds none or some. CPU time of the calling thread; beside it the
cost of visiting each worker once in Python, in the same run. A shared core can be slower for a
while: the last column is p99/p50 of constant work, done in turns with the placements.
"""

from __future__ import annotations

import random
import time
from statistics import median

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
PLACEMENTS = 2000
SAME_WORK = 20_000
SIZES = (2, 4, 16, 100, 1000)
FLEETS = {"do both": (Role.BOTH,), "prefill and decode": (Role.PREFILL, Role.DECODE)}


def fleet(size: int, roles: tuple[Role, ...]) -> tuple[ClusterView, CostPlacer]:
    """So many workers, some of them holding a part of the prompt."""
    chance = random.Random(size)
    cluster, index = ClusterView(), PrefixIndex(block_table())
    for number in range(size):
        worker_id, role = f"w{number}", roles[number % len(roles)]
        cluster.record(record(worker_id, role=role, connector="baton-1"), 0.0)
        busy = {"waiting_tokens": chance.randrange(5000), "running": chance.randrange(16), "kv_blocks_total": 10_000}
        cluster.report(load(worker_id, role=role, **busy), 0.0)
        index.join(WorkerId(worker_id), 1)
        held = chance.choice((0, 0, 0, chance.randrange(BLOCKS)))
        snapshot = KvSnapshot(worker_id=worker_id, epoch=1, seq=1, hashes=pack_hashes(range(1, held + 1)))
        index.restore(snapshot)
    return cluster, CostPlacer(cluster, index, PlacementPolicy())


def measure(size: int, roles: tuple[Role, ...]) -> tuple[float, float, float, float]:
    """Microseconds of CPU: p50 and p99 of one placement, and p50 of one look at each worker; last, p99 to p50 of what is
    always the same.
    """
    cluster, costs = fleet(size, roles)
    request = PlacementRequest(model="m", prompt_tokens=BLOCKS * BLOCK_TOKENS + 5, hashes=tuple(range(1, BLOCKS + 1)))
    took_us, scan_us, same_us = [], [], []
    tune_garbage_collection()
    for number in range(PLACEMENTS):
        began_s = time.thread_time()
        placement = costs.place(request, 0.0)
        took_us.append((time.thread_time() - began_s) * 1e6)
        assert isinstance(placement, Placement)
        sent = Sent(0.0, placement.uncached_tokens, placement.context_tokens)
        cluster.leg_started(placement.decode.record.worker_id, sent)
        cluster.leg_ended(placement.decode.record.worker_id, sent, placement.context_tokens)
        began_s = time.thread_time()
        sum(range(SAME_WORK))
        same_us.append((time.thread_time() - began_s) * 1e6)
        if number % 20 == 0:
            began_s = time.thread_time()
            sum(view.own.tokens for view in cluster.workers.values())
            scan_us.append((time.thread_time() - began_s) * 1e6)
    took_us.sort()
    same_us.sort()
    middle, late = PLACEMENTS // 2, PLACEMENTS * 99 // 100
    return took_us[middle], took_us[late], median(scan_us), same_us[late] / same_us[middle]


def main() -> None:
    print("| workers | that | place µs p50 | p99 | one look at each worker µs | p99 / p50 of the same work |")
    print("|---:|---|---:|---:|---:|---:|")
    for size in SIZES:
        for label, roles in FLEETS.items():
            p50, p99, scan, same = measure(size, roles)
            print(f"| {size} | {label} | {p50:.0f} | {p99:.0f} | {scan:.1f} | {same:.2f} |", flush=True)


if __name__ == "__main__":
    main()
