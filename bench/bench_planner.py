"""The planner on a real trace, in virtual time: does it oscillate, and is it worth its workers? See docs/benchmarks/planner.md.

    python -m bench.bench_planner TRACE [--load 2 --hours 2 --swing 0.7 --day-hours 1] [--fixed-size 8] ...

A table: the planned fleet, fixed fleets of its mean size (split as the planner did on average, and otherwise until that
gets worse, so that the best split is among them), and one of its largest size. ``--fixed-size``: no worker can be started, so the planner can only change roles.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from bench.planned_replay import Delays, PlannedWorld
from bench.planned_runs import UNDONE_S, Course, Outcome, run, split_by, splits, undone
from bench.planned_traffic import Traffic, traffic
from bench.study.results import Slo
from replay.profile import PROFILES
from replay.split import Split
from replay.traces import read_trace
from services.orchestrator.planner.rules import Rules
from services.router.admission.policy import AdmissionPolicy

WORKERS_MAX = 64
HEAD = (
    "fleet | workers: mean (most) | worker-hours | good % | TTFT p50, p95 s | ITL p95 ms | refused % "
    f"| role changes/h | scalings/h | undone within {UNDONE_S / 60:.0f} min"
)
PART_S = 300.0
"""Of the timeline."""


def line(outcome: Outcome, hours: float, *, planned: bool) -> str:
    split = outcome.split
    cells = [
        outcome.name if planned else f"{outcome.name}: {split.prefill} P + {split.decode} D",
        f"{outcome.workers_mean:.1f} ({outcome.workers_max})",
        f"{outcome.worker_hours:.1f}",
        f"{outcome.good:.1%}".rstrip("%"),
        f"{outcome.ttft_p50:.2f}, {outcome.ttft_p95:.2f}",
        f"{outcome.itl_p95 * 1000:.0f}",
        f"{outcome.refused:.1%}".rstrip("%"),
    ]
    if planned:
        cells += [f"{outcome.switches / hours:.1f}", f"{outcome.scalings / hours:.1f}", str(outcome.undone)]
    else:
        cells += ["", "", ""]
    return f"| {' | '.join(cells)} |"


def told(world: PlannedWorld) -> Iterator[str]:
    """What was decided, and how large the fleet was."""
    swings = undone(world.changes, UNDONE_S)
    for at, change in world.changes:
        mark = "  <- undoes" if (at, change) in swings else ""
        what = f"{change.worker_id} becomes {change.role}" if change.worker_id else f"{change.change:+d} {change.role}"
        yield f"  {at / 60:6.1f} min  {what:32} {change.why}{mark}"
    for part, sizes in groupby(world.sizes, key=lambda size: size.at // PART_S):
        last = list(sizes)[-1]
        decisions = [each for each in world.decisions if each.at_ms / 1000 // PART_S == part and each.roles]
        if decisions:
            loads = ", ".join(f"{each.role.value} {each.load:.2f}" for each in decisions[-1].roles)
            rate = decisions[-1].demand.requests_per_s
            yield f"  {last.at / 60:6.1f} min  {last.prefill} P {last.decode} D of {last.all}; {rate:.1f}/s, load {loads}"


def compare(course: Course, options: argparse.Namespace) -> Iterator[str]:
    """The table's lines, and above them what was decided if that is wanted."""
    fixed_size = options.fixed_size
    rules = Rules(
        ttft_s=course.slo.ttft_s,
        itl_s=course.slo.itl_s,
        workers_min=fixed_size or 1,
        workers_max=fixed_size or WORKERS_MAX,
    )
    start = split_by(fixed_size, 0.5) if fixed_size else Split(prefill=options.prefill, decode=options.decode)
    planned, world = run(course, start, "planned", rules)
    if options.verbose:
        yield from told(world)
    yield f"| {HEAD} |"
    yield f"|{'---|' * (HEAD.count('|') + 1)}"
    yield line(planned, course.hours, planned=True)
    if options.alone:
        return
    tried = []
    for fixed in splits(course, planned.split):
        tried.append(fixed)
        yield line(fixed, course.hours, planned=False)
    best = max(tried, key=lambda one: one.good)
    if planned.workers_max > planned.workers_mean + 1:
        share = best.split.prefill / (best.split.prefill + best.split.decode)
        most, _world = run(course, split_by(planned.workers_max, share), "fixed, as large as ever")
        yield line(most, course.hours, planned=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="Mooncake's .jsonl or Azure's .csv")
    parser.add_argument("--load", type=float, default=2.0, help="times the trace's own rate, on average")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--swing", type=float, default=0.0, help="of the load within a day; 0.7: from 0.3 to 1.7 times")
    parser.add_argument("--day-hours", type=float, default=1.0)
    parser.add_argument("--turn-hours", type=float, default=0.0, help="prompt-heavy and answer-heavy requests by turns")
    parser.add_argument("--fixed-size", type=int, default=0, help="so many workers, of which only roles change")
    parser.add_argument("--prefill", type=int, default=2, help="at the beginning")
    parser.add_argument("--decode", type=int, default=2, help="at the beginning")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="8b")
    parser.add_argument("--start-s", type=float, default=Delays().start_s, help="until a new worker is ready")
    parser.add_argument("--slo-ttft", type=float, default=5.0)
    parser.add_argument("--slo-itl", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="the planned fleet only")
    parser.add_argument("--verbose", action="store_true", help="every change, and the fleet every five minutes")
    options = parser.parse_args()
    wanted = Traffic(
        load=options.load,
        hours=options.hours,
        swing=options.swing,
        day_hours=options.day_hours,
        turn_hours=options.turn_hours,
    )
    course = Course(
        requests=traffic(read_trace(options.trace, seed=options.seed), wanted),
        profile=PROFILES[options.profile],
        slo=Slo(ttft_s=options.slo_ttft, itl_s=options.slo_itl),
        delays=Delays(start_s=options.start_s),
        hours=options.hours,
        admission=AdmissionPolicy(),
    )
    for text in compare(course, options):
        print(text, flush=True)


if __name__ == "__main__":
    main()
