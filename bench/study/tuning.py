"""The same tuning budget for every system: so many points of its parameters, on one trace, by goodput; then frozen.

The first point is the system's defaults, the others are drawn at random, without repetition, from the grid of values
that ``bench.policies.systems`` documents for it; a smaller grid is tried whole. The score of a point is the mean, over
the loads, of its good share of requests and its good share of tokens: the first alone would reward refusing long
prompts. Of equal points the earlier one is kept.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean

import msgspec

from bench.policies.systems import System, parse
from bench.study.experiment import Setting, run
from bench.study.results import Slo

TUNED = [
    *("baton-waiting", "baton-strict", "baton-default"),
    *("dynamo", "dynamo-queue", "llm-d", "llm-d-sticky", "llm-d-flow", "mooncake", "mooncake-rejecting"),
    *("sglang", "sglang-exact", "vllm-router", "production-stack"),
    *("baton+edf+refuse", "dynamo+edf+refuse", "llm-d-sticky+edf+refuse", "mooncake+edf+refuse"),
    *("sglang-exact+edf+refuse", "sglang+edf+refuse", "llm-d+edf+refuse"),
]
"""Systems as shipped, and each rule with queue and refusal. The other cells of the factorial take their values from the
latter (``Frozen.name``).
"""
FROZEN = Path(__file__).with_name("tuned.json")


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """One point."""

    values: dict[str, float]
    """Those that are not defaults."""
    score: float
    """0 to 1."""


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """The choice for one system."""

    values: dict[str, float]
    """Those that are not defaults."""
    score: float
    default_score: float
    tried: list[Tried]


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What all systems were tuned with."""

    trace: str
    """Name of its file, or of the workload."""
    trace_sha256: str
    """Empty for a workload."""
    requests: int
    loads: list[float]
    workers: dict[str, int]
    profile: str
    slo: Slo
    seed: int
    points: int


class Frozen(msgspec.Struct, frozen=True, kw_only=True):
    """All choices."""

    budget: Budget
    systems: dict[str, Tuned]

    def name(self, policy: str) -> str:
        """The policy with its tuned values: its own, or those of its rule with queue and refusal as far as it has these
        parameters; unchanged if there are none. Raises UnknownPolicyError.
        """
        system = parse(policy)
        tuned = self.systems.get(policy) or self.systems.get(f"{system.rule}+edf+refuse")
        values = tuned.values if tuned is not None else {}
        return system.named({**{key: values[key] for key in values if key in system.parameters}, **system.values})


def read_frozen(path: Path = FROZEN) -> Frozen:
    """Choices that were written by ``write_frozen``; raises OSError and msgspec.DecodeError."""
    return msgspec.json.decode(path.read_bytes(), type=Frozen)


def write_frozen(frozen: Frozen, path: Path) -> None:
    """Write them, for people too."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(frozen), indent=1) + b"\n")


def points_of(system: System, count: int, seed: int) -> list[dict[str, float]]:
    """At most ``count`` points, the defaults first; values that are defaults are left out."""
    parameters = system.parameters
    grid = [
        {name: value for name, value in zip(parameters, values, strict=True) if value != parameters[name].default}
        for values in product(*(parameter.values for parameter in parameters.values()))
    ]
    others = [point for point in grid if point]
    rng = random.Random(f"{seed} {system.named({})}")
    return [{}, *rng.sample(others, min(count - 1, len(others)))]


def score(setting: Setting, loads: Sequence[float], policy: str) -> float:
    """The mean good share over the loads, of requests and of tokens."""
    results = [run(setting, policy, load) for load in loads]
    return fmean((result.good_share + result.good_tokens_share) / 2 for result in results)


def tune(
    setting: Setting, loads: Sequence[float], policies: Sequence[str], points: int, jobs: int = 1
) -> Iterator[tuple[str, Tuned]]:
    """The choice for each policy, with the points of one policy in so many processes."""
    with ProcessPoolExecutor(jobs) as pool:
        for policy in policies:
            system = parse(policy)
            tries = points_of(system, points, setting.seed)
            named = [system.named(values) for values in tries]
            scores = list(pool.map(partial(score, setting, loads), named))
            tried = [Tried(values=values, score=one) for values, one in zip(tries, scores, strict=True)]
            best = max(tried, key=lambda one: one.score)
            yield policy, Tuned(values=best.values, score=best.score, default_score=scores[0], tried=tried)
