"""The placement study: runs what is missing, and writes the measured part of docs/benchmarks/replay.md.

    make bench-replay TRACES="mooncake-conversations=FILE azure-conversations=FILE"       an hour and a half on two free cores
    make bench-replay ARGS=--quick                                                        minutes, into the runs' folder
    make bench-replay ARGS="--only fleets"
    make bench-replay ARGS="--seeds 3"   no more than three seeds in any section
    make bench-replay ARGS=--whole       more workloads, an hour long, ten seeds everywhere: ten hours of a core
    make bench-replay ARGS=--check       is every row of the page as new as the code?
    make bench-replay ARGS=--mark        after a change of the code: mark the rows that are older

Runs are kept in a folder; an interrupted study continues where it was.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.kv_bench_page import machine
from bench.study import page, pictures
from bench.study.bound import Bound
from bench.study.code_digest import ROOT
from bench.study.plan import LOADS, PLAN, WHOLE_SEEDS, Fleet, Plan, Section, Workload, chosen, quick, sized, whole
from bench.study.rows import Data, Group, group_of
from bench.study.runs import Case, Failed, Store, Workshop, in_parallel

PAGE = ROOT / "docs/benchmarks/replay.md"
FOLDER = ROOT / "study-runs"
LINE_S = 60.0
"""Between two lines of progress where there is no terminal."""
ROWS = "replay.json"
RUN_S_PER_REQUEST, BOUND_S_PER_REQUEST = 0.0006, 0.0003
KNEE_RUNS = 20
"""Guesses, until some runs have ended."""

screen = Console(stderr=True, soft_wrap=True)


class Bar:
    """Progress with the time that is left, from the time of the runs that have ended."""

    def __init__(self, what: str, total: int, *, left_s: float, jobs: int) -> None:
        self._what, self._total, self._left_s, self._jobs = what, total, left_s, jobs
        self._done, self._began_s, self._line_s = 0, time.monotonic(), 0.0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)

    def __enter__(self) -> Self:
        self._bars.start()
        self._task = self._bars.add_task(self._what, total=self._total)
        screen.print(f"{self._what}: {self._total}, about {duration(self._left_s)} on {self._jobs} processes")
        return self

    def __exit__(self, *_exc: object) -> None:
        self._bars.stop()

    def ended(self, name: str) -> None:
        self._done += 1
        took_s = time.monotonic() - self._began_s
        left = duration(took_s / self._done * (self._total - self._done))
        self._bars.update(self._task, completed=self._done, description=f"{self._what}: {left} left, last {name}")
        if not screen.is_terminal and (took_s - self._line_s > LINE_S or self._done == self._total):
            self._line_s = took_s
            screen.print(f"{self._what}: {self._done} of {self._total}, {left} left, last {name}")


def duration(seconds: float) -> str:
    """For people."""
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def study(plan: Plan, workshop: Workshop, jobs: int) -> list[Group]:
    """Search for the knees, run everything, and compare. Raises Failed."""
    pairs = {
        f"{workload.name}, {fleet.name}": (workload, fleet)
        for section in plan.sections.values()
        for workload in section.workloads
        for fleet in section.fleets
    }
    knees: dict[str, float] = {}
    search_s = sum(KNEE_RUNS * RUN_S_PER_REQUEST * workload.count(fleet) for workload, fleet in pairs.values()) / jobs
    with Bar("knees", len(pairs), left_s=search_s, jobs=jobs) as bar:
        for name, found in in_parallel(jobs, pairs, workshop.knee):
            assert isinstance(found, float)
            knees[name] = found
            bar.ended(f"{name}: {found:g}")
    cases = {
        (name, workload, fleet, label, policy, seed): workshop.case(
            workload, fleet, knees[f"{workload.name}, {fleet.name}"] * LOADS[label], section.run_as(policy), seed
        )
        for name, section in plan.sections.items()
        for workload, fleet, label in each_of(section)
        for policy in section.policies
        for seed in section.seeds_of(workload)
    }
    run_all(list(cases.values()), workshop, jobs)
    bounds = bound_all({(case.workload, case.fleet, case.load, case.seed) for case in cases.values()}, workshop, jobs)
    grouped: dict[tuple[str, Workload, Fleet, str], dict[str, list[Case]]] = defaultdict(lambda: defaultdict(list))
    for (name, workload, fleet, label, policy, _seed), case in cases.items():
        grouped[name, workload, fleet, label][policy].append(case)
    commit = commit_now()
    return [
        group_of(
            (name, label),
            {policy: [workshop.run(case) for case in each] for policy, each in by_policy.items()},
            [bounds[workload, fleet, case.load, case.seed] for case in next(iter(by_policy.values()))],
            commit,
            is_tuned=workload.is_tuned,
        )
        for (name, workload, fleet, label), by_policy in grouped.items()
    ]


def each_of(section: Section) -> list[tuple[Workload, Fleet, str]]:
    """All combinations."""
    return [
        (workload, fleet, label)
        for workload in section.workloads
        for fleet in section.fleets
        for label in section.loads
    ]


def run_all(cases: list[Case], workshop: Workshop, jobs: int) -> None:
    """Run what is not kept, those of the same requests together; all of the first seed first, so that a study that is
    stopped has whole seeds.
    """
    store = Store(workshop.folder)
    missing = {case.key: case for case in cases if not store.has(case)}
    screen.print(f"{len({case.key for case in cases}) - len(missing)} runs are kept from before")
    batches: dict[str, list[Case]] = defaultdict(list)
    for case in sorted(missing.values(), key=lambda case: case.seed):
        batches[f"{case.workload.name}, {case.fleet.name}, load {case.load:g}, seed {case.seed}"].append(case)
    left_s = sum(RUN_S_PER_REQUEST * case.workload.count(case.fleet) for case in missing.values()) / jobs
    with Bar("runs with the same requests", len(batches), left_s=left_s, jobs=jobs) as bar:
        for name, _none in in_parallel(jobs, batches, workshop.run_kept):
            bar.ended(name)


def bound_all(
    wanted: set[tuple[Workload, Fleet, float, int]], workshop: Workshop, jobs: int
) -> dict[tuple[Workload, Fleet, float, int], Bound]:
    """By workload, fleet, load and seed."""
    works = {f"{one[0].name}, {one[1].name}, {one[2]:g}, {one[3]}": one for one in wanted}
    found: dict[tuple[Workload, Fleet, float, int], Bound] = {}
    with Bar(
        "bounds",
        len(works),
        left_s=sum(BOUND_S_PER_REQUEST * workload.count(fleet) for workload, fleet, _load, _seed in wanted) / jobs,
        jobs=jobs,
    ) as bar:
        for name, bound in in_parallel(jobs, works, workshop.bound):
            assert isinstance(bound, Bound)
            found[works[name]] = bound
            bar.ended(name)
    return found


def commit_now() -> str:
    """Short name of the commit, with a plus where files have changed since."""
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return said.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="append", default=[], metavar="WORKLOAD=FILE", help="again for each trace")
    parser.add_argument("--only", default="", help=f"sections, with commas between: {', '.join(PLAN.sections)}")
    parser.add_argument("--seeds", type=int, default=WHOLE_SEEDS, help="no more than so many in any section")
    parser.add_argument(
        "--whole", action="store_true", help="more workloads, an hour long, ten seeds: ten hours of a core"
    )
    parser.add_argument("--quick", action="store_true", help="small workloads and few seeds; writes into the folder")
    parser.add_argument("--runs", type=Path, default=FOLDER, help="the folder of runs")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--check", action="store_true", help="fail if a row of the page is older than the code")
    parser.add_argument("--check-marks", action="store_true", help="fail if such a row is not marked; in `make check`")
    parser.add_argument("--mark", action="store_true", help="mark such rows")
    options = parser.parse_args()
    rows = options.page.parent / ROWS
    if options.check or options.check_marks or options.mark:
        return check_rows(options, rows)
    traces = {name: Path(file).resolve() for name, _, file in (one.partition("=") for one in options.trace)}
    plan = sized(quick(PLAN) if options.quick else whole(PLAN) if options.whole else PLAN, seeds_max=options.seeds)
    only = [one for one in options.only.split(",") if one]
    if unknown := [one for one in only if one not in plan.sections]:
        parser.error(f"there are no sections {', '.join(unknown)}")
    plan, missing = chosen(plan, only, list(traces))
    workshop = Workshop(options.runs, traces, plan.slo)
    try:
        groups = study(plan, workshop, options.jobs)
    except Failed as error:
        screen.print(f"{error}\nNothing was written; what has ended is kept.", style="red", markup=False)
        return 1
    size = "quick" if options.quick else "whole" if options.whole else ""
    data = Data(
        command=" ".join(["make bench-replay", *([f"ARGS=--{size}"] if size else [])]),
        machine=machine(),
        is_quick=options.quick,
        ttft_s=plan.slo.ttft_s,
        itl_s=plan.slo.itl_s,
        missing=missing,
        groups=groups,
    )
    write(data, options, rows, only)
    return 0


def write(data: Data, options: argparse.Namespace, rows: Path, only: list[str]) -> None:
    """The page, its rows and pictures; a quick run's go into the folder of runs, so that it replaces no figures."""
    folder = options.runs if options.quick else options.page.parent
    if only and not options.quick and rows.exists():
        kept = [group for group in page.read(rows).groups if group.section not in only]
        order = list(PLAN.sections)
        groups = sorted([*kept, *data.groups], key=lambda group: order.index(group.section))
        data = Data(**{name: getattr(data, name) for name in data.__struct_fields__ if name != "groups"}, groups=groups)
    names = pictures.draw(data, folder)
    text = page.with_measured(options.page.read_text(encoding="utf-8"), data, names)
    (folder / options.page.name).write_text(text, encoding="utf-8")
    page.write(data, folder / ROWS)
    print(folder / options.page.name)


def check_rows(options: argparse.Namespace, rows: Path) -> int:
    """--check, --check-marks and --mark."""
    drawn = [name for name in page.PICTURES if f"(replay-{name}.png)" in options.page.read_text(encoding="utf-8")]
    if options.mark and rows.exists():
        text = page.with_measured(options.page.read_text(encoding="utf-8"), page.read(rows), drawn)
        options.page.write_text(text, encoding="utf-8")
    found = page.problems(options.page, rows, drawn)
    if options.check:
        found += page.stale(page.read(rows)) if rows.exists() else [f"{options.page} was not measured by this study"]
    print("\n".join(found) or "every row is as new as the code, or marked", file=sys.stderr if found else sys.stdout)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
