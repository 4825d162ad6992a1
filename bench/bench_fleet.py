"""Recovery times of a fleet after failures and changes; writes docs/benchmarks/fleet.md.

Each row is a fault or a change in a fleet of simulated workers while long streams run, repeated several times. Every
answer is compared with the only correct one, so no figure stems from a wrong answer.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from bench.fleet_faults import FleetFaults, Seen
from bench.kv_bench_page import machine, table
from tests.nightly.chaos.chaos import Run, opened_run
from tests.nightly.chaos.faults import Kind
from tests.nightly.chaos.fleet import Size

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "fleet.md"
SIZE = Size(prefill=3, decode=4, both=0, skewed_share=0.0)
TIMES = 5
HEAD = "fault | detected s | longest gap of a stream s | recovered s | streams | affected | failed"
PAGE_HEAD = """# Recovery times of a fleet

`make bench-fleet`. Simulated engines, everything else as in production: {workers} workers, two routers, two orchestrators, a
collector, each in its own process, on one machine. Medians of {times} (min to max). Streams produce a token about every 20 ms.

* detected: until the orchestrator has announced it (for a new leader: until it replies).
* longest gap: between two pieces of an affected stream, as its client sees it. Every answer equals the undisturbed one.
* recovered: from the end of the fault (the process is restarted, resumed, or may connect again) until all workers are ready,
  every router's index of every worker is exact, and an orchestrator leads. For a killed process this includes its start: Python,
  the tokenizer, and KV self-tests with its partners.
* failed: streams without a complete answer. Those of a killed router end with their connections.

*Measured {when} UTC, on {machine}{remark}.*

"""


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(prog="bench-fleet", description=__doc__)
    parser.add_argument("--times", type=int, default=TIMES)
    parser.add_argument("--remark", default="", help="about the machine, for the page")
    parser.add_argument("--no-page", action="store_true", help="only print")
    given = parser.parse_args()
    page = asyncio.run(measure(given.times, given.remark))
    print("\n".join(page))
    if not given.no_page:
        PAGE.write_text("\n".join(page))


async def measure(times: int, remark: str) -> list[str]:
    """All rows."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        async with opened_run(SIZE, Path(folder)) as run:
            faults = FleetFaults(run)
            await faults.open()
            try:
                return await _page(run, faults, times, remark)
            finally:
                await faults.close()


async def _page(run: Run, faults: FleetFaults, times: int, remark: str) -> list[str]:
    broken = [
        (
            "the worker with the most streams is killed and restarted at once",
            lambda: faults.break_worker(Kind.KILL, 0.0),
        ),
        (
            "the worker with the most streams is killed and restarted after 6 s",
            lambda: faults.break_worker(Kind.KILL, 6.0),
        ),
        ("the worker with the most streams freezes for 6 s", lambda: faults.break_worker(Kind.FREEZE, 6.0)),
        (
            "the worker with the most streams is disconnected from NATS for 4 s",
            lambda: faults.break_worker(Kind.CUT, 4.0),
        ),
        ("the leading orchestrator is killed", faults.kill_leader),
        ("a router is killed", faults.kill_router),
        ("NATS is killed for 1 s", lambda: faults.kill_nats(1.0, forget=False)),
        ("NATS is killed for 1 s and loses its storage", lambda: faults.kill_nats(1.0, forget=True)),
    ]
    rows = [_row(what, [await _quiet(run, act) for _ in range(times)]) for what, act in broken]
    head = PAGE_HEAD.format(
        workers=len(SIZE.roles),
        times=times,
        when=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        machine=machine(),
        remark=f"; {remark}" if remark else "",
    )
    lines = [head, "## Faults", "", *table(HEAD, rows)]
    changed = [
        ("a worker is added: from process start until ready", faults.add_worker),
        ("a role changes, decode to both and back, verified", faults.change_role),
        ("the worker with the most streams drains and evacuates its prefixes", faults.drain_worker),
    ]
    rows = []
    for what, act in changed:
        seen = [await _quiet(run, act) for _ in range(times)]
        notes = "; ".join(dict.fromkeys(one.note for one in seen if one.note))
        rows.append([what, _spread([one.noticed_s for one in seen]), notes, sum(one.failed for one in seen)])
    return [*lines, "## Changes", "", *table("change | seconds | remarks | failed", rows)]


async def _quiet(run: Run, act: Callable[[], object]) -> Seen:
    """One fault or change; the fleet is healthy before and after."""
    await run.ready()
    began = time.monotonic()
    seen = await act()
    print(f"{time.monotonic() - began:.1f} s: {seen}", file=sys.stderr)
    assert isinstance(seen, Seen)
    return seen


def _row(what: str, seen: Sequence[Seen]) -> list[object]:
    return [
        what,
        _spread([one.noticed_s for one in seen]),
        _spread([one.silence_s for one in seen]),
        _spread([one.as_before_s for one in seen]),
        sum(one.streams for one in seen),
        sum(one.hit for one in seen),
        sum(one.failed for one in seen),
    ]


def _spread(values: Sequence[float]) -> str:
    known = sorted(value for value in values if value >= 0)
    return f"{median(known):.2f} ({known[0]:.2f} to {known[-1]:.2f})" if known else ""


if __name__ == "__main__":
    main()
