"""``python -m tests.nightly.chaos``: the long form. Exits with 1 when a promise was broken."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import get_args

from services.worker.engines.simulated.core.groups import Kind
from tests.nightly.chaos.chaos import Report, opened_run
from tests.nightly.chaos.dense import run_dense
from tests.nightly.chaos.faults import MENU, WORKERS_ONLY
from tests.nightly.chaos.fleet import Size
from tests.nightly.chaos.nats_cluster import LOOPBACK
from tests.nightly.chaos.trace import Shape

BATCH_EVERY_S = 30.0


def main() -> None:
    """Parse, run, tell."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--workers", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--requests-per-s", type=float, default=12.0)
    parser.add_argument("--every-s", type=float, default=3.0, help="mean seconds from one fault to the next")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nats-nodes", type=int, default=1, help="servers of a NATS cluster")
    parser.add_argument("--host", default=LOOPBACK, help="address of everybody, such as ::1")
    parser.add_argument("--dense", action="store_true", help="a small fleet, and a fault every 1.2 s (see dense.py)")
    parser.add_argument("--workers-only", action="store_true", help="only workers die or freeze: no request may fail")
    parser.add_argument("--groups", choices=get_args(Kind), default="full", help="what the models' layers are")
    parser.add_argument("--logs", type=Path, default=None, help="folder for what the processes said")
    given = parser.parse_args()
    report = asyncio.run(run(given))
    print(report.summary())
    broken_promises = [*report.broken_promises(), *(report.failures if given.workers_only else [])]
    sys.exit(1 if broken_promises else 0)


async def run(given: argparse.Namespace) -> Report:
    """One chaos of the size that was asked for."""
    if given.dense:
        print("the dense profile", flush=True)
        with tempfile.TemporaryDirectory(prefix="baton-chaos-") as scratch:
            return await run_dense(given.seed, given.logs or Path(scratch), given.groups)
    others = max(1, given.workers // 8)
    stores = max(1, given.workers // 16) if given.groups == "full" else 0  # A store refuses the others.
    engines = given.workers - 2 * others - stores
    prefill = max(2, engines * 2 // 5)
    both = max(0, engines // 10)
    size = Size(
        prefill=prefill,
        decode=max(2, engines - prefill - both),
        both=both,
        other=2 * others,
        stores=stores,
        adapter=True,
        planner=True,
        keys=True,
        groups=given.groups,
        nats_nodes=given.nats_nodes,
        host=given.host,
        proxied_share=min(1.0, 12 / given.workers),
        seed=given.seed,
    )
    shape = Shape(
        seed=given.seed, seconds=60 * given.minutes, requests_per_s=given.requests_per_s, batch_every_s=BATCH_EVERY_S
    )
    menu = WORKERS_ONLY if given.workers_only else MENU
    with tempfile.TemporaryDirectory(prefix="baton-chaos-") as scratch:
        async with opened_run(size, given.logs or Path(scratch)) as opened:
            print(f"{given.workers} workers are ready", flush=True)
            return await opened.chaos(shape, given.every_s, menu)


if __name__ == "__main__":
    main()
