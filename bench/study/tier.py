"""A tier in host memory, replayed: hits by tier and goodput with and without it.

    python -m bench.study.tier [TRACE] [--jobs 2] [--seeds 3]

TRACE is Mooncake's trace of conversations; without it that row is left out. The tables go into
``docs/benchmarks/tier.md``, between its marks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bench.marks import replaced
from bench.policies import BATON_WAITING
from bench.study.experiment import Setting, run
from bench.study.results import Result, Slo
from bench.study.workloads import generate
from replay.profile import PROFILES
from replay.simworker import HOST_WORKERS
from replay.split import Split
from replay.traces import read_trace

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "tier.md"
TIB, GIB = 1 << 40, 1 << 30
PROFILE = PROFILES["8b"]
SLO = Slo()
SPLIT = Split(both=HOST_WORKERS)


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory behind the engines' KV caches."""

    name: str
    tier_bytes: int = 0
    """Memory of the host's store."""


MEMORIES = (Memory("none"), Memory("tier, 256 GiB", tier_bytes=256 * GIB), Memory("tier, 1 TiB", tier_bytes=TIB))


@dataclass(frozen=True, slots=True)
class Traffic:
    """One workload at several loads."""

    name: str
    requests: int
    loads: tuple[float, ...]
    """As ``--loads`` of ``bench.study.cli replay``."""
    is_trace: bool = False


MADE = (Traffic("agents", 5_000, (4, 5.35)), Traffic("conversations", 20_000, (160, 240)))
TRACED = Traffic("mooncake-conversations", 12_031, (2.1, 3), is_trace=True)
POLICIES = (BATON_WAITING,)


@dataclass(frozen=True, slots=True)
class Case:
    """The runs of one row, a seed each."""

    traffic: Traffic
    load: float
    policy: str
    memory: Memory


def measure(case: Case, seed: int, trace: Path | None) -> Result:
    """One run."""
    if case.traffic.is_trace:
        assert trace is not None
        requests = read_trace(trace, seed=seed)
    else:
        requests = generate(case.traffic.name, case.traffic.requests, seed=seed)
    setting = Setting(
        requests=requests, split=SPLIT, profile=PROFILE, slo=SLO, seed=seed, host_memory_bytes=case.memory.tier_bytes
    )
    return run(setting, case.policy, case.load)


HEAD = (
    "| host memory | cached % | store % | other workers % | computed % | TTFT p50 s | p95 s "
    "| in time % | tokens in time % | requests/s in time |"
)
RULE = "|---|" + "---:|" * 9


def row(memory: Memory, results: Sequence[Result]) -> str:
    """Means over the seeds; of goodput the smallest and largest, too."""

    def mean(of: Iterable[float], scale: float = 100.0, digits: int = 1) -> str:
        return f"{scale * fmean(of):.{digits}f}"

    def spread(of: Iterable[float]) -> str:
        values = [100 * one for one in of]
        mean = f"{fmean(values):.1f}"
        return mean if len(values) == 1 else f"{mean} ({min(values):.1f} to {max(values):.1f})"

    cells = [
        memory.name,
        mean(one.hit_share for one in results),
        mean(one.tier_share for one in results),
        mean(one.fetched_share - one.tier_share for one in results),
        mean(1 - one.hit_share - one.fetched_share for one in results),
        mean((one.ttft.p50 for one in results), 1, 2),
        mean((one.ttft.p95 for one in results), 1, 2),
        spread(one.good_share for one in results),
        spread(one.good_tokens_share for one in results),
        mean((one.goodput_per_s for one in results), 1, 2),
    ]
    return "| " + " | ".join(cells) + " |"


def tables(found: dict[Case, list[Result]]) -> str:
    """One for each traffic, load and policy."""
    parts: list[str] = []
    for traffic, load, policy in dict.fromkeys((case.traffic, case.load, case.policy) for case in found):
        rows = {
            case.memory: results
            for case, results in found.items()
            if (case.traffic, case.load, case.policy) == (traffic, load, policy)
        }
        offered = fmean(one.offered_per_s for one in next(iter(rows.values())))
        title = f"**{traffic.name}, load {load:g}** ({offered:.1f} requests/s), `{policy}`:"
        parts.append("\n".join([title, "", HEAD, RULE, *(row(memory, results) for memory, results in rows.items())]))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Measure all, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    cases = [
        Case(traffic, load, policy, memory)
        for traffic in (*MADE, *([TRACED] if given.trace else []))
        for load in traffic.loads
        for policy in POLICIES
        for memory in MEMORIES
    ]
    found: dict[Case, list[Result]] = {case: [] for case in cases}
    with ProcessPoolExecutor(given.jobs) as pool:
        for seed in range(1, given.seeds + 1):
            works = ((case, seed, given.trace) for case in cases)
            for case, result in zip(cases, pool.map(measure, *zip(*works, strict=True)), strict=True):
                found[case].append(result)
                print(case.traffic.name, case.load, case.memory.name, seed, f"{result.good_share:.4f}", flush=True)
            PAGE.write_text(replaced(PAGE.read_text(), "\n" + tables(found) + "\n"))


if __name__ == "__main__":
    main()
