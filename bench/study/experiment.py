"""Runs one policy at one load on one fleet, and searches for the knee."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bench.policies import systems
from bench.policies.base import PolicyContext
from bench.policies.world import PolicyWorld
from bench.study.results import Result, Slo, summarise
from replay.legs import ReplayedRequest
from replay.profile import Profile
from replay.split import Split
from replay.traces import Request, at_load

KNEE_RATIO = 1.02
"""Precision of the search."""
KNEE_LOAD_MAX = 4096.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Common to all runs of a comparison."""

    requests: list[Request]
    """At load 1."""
    split: Split
    profile: Profile
    slo: Slo
    seed: int
    slow: Mapping[int, float] = field(default_factory=dict)
    """Speeds of slow workers by number; policies with an exact model of the engines do not know of them."""
    host_memory_bytes: int = 0
    """Memory of a store on each host; 0: none."""


def run(
    setting: Setting, policy: str, load: float, label: str = "", progress: Callable[[int], None] = lambda _number: None
) -> Result:
    """Run one policy (see ``bench.policies.systems``)."""
    return run_with_outcomes(setting, policy, load, label, progress)[0]


def run_with_outcomes(
    setting: Setting, policy: str, load: float, label: str = "", progress: Callable[[int], None] = lambda _number: None
) -> tuple[Result, list[ReplayedRequest]]:
    """As ``run``, with each request's outcome."""
    requests = at_load(setting.requests, load)
    world = PolicyWorld(
        setting.split,
        setting.profile,
        slow=setting.slow,
        seed=setting.seed,
        host_memory_bytes=setting.host_memory_bytes,
    )
    install(world, policy, setting)
    began_s = time.process_time()
    was_collecting = gc.isenabled()
    gc.disable()  # A run makes millions of objects and hardly any cycle before its end.
    try:
        outcomes = world.run(requests, progress)
    finally:
        if was_collecting:
            gc.enable()
    cpu_s = time.process_time() - began_s
    name = (policy, load, label or f"{load:g}")
    return summarise(name, outcomes, world.workers.values(), setting.slo, cpu_s), outcomes


def install(world: PolicyWorld, policy: str, setting: Setting) -> None:
    """Make ``policy`` the world's; raises UnknownPolicyError."""
    context = PolicyContext(
        fleet=world.fleet,
        counts=world.counts,
        profile=setting.profile,
        slo_ttft_s=setting.slo.ttft_s,
        slo_itl_s=setting.slo.itl_s,
        seed=setting.seed,
    )
    systems.install(world, policy, context)


def find_knee(setting: Setting, policies: list[str], report: Callable[[Result], None] = lambda _result: None) -> float:
    """The largest load at which the best of these policies keeps the target with the p95 of TTFT, to two per cent.

    Found by bisection: the first policy's knee, then the knee of each policy that still keeps the target there.
    """

    def keeps(policy: str, load: float) -> bool:
        result = run(setting, policy, load, "search")
        report(result)
        return result.ttft.p95 <= setting.slo.ttft_s

    knee = 0.0
    for policy in policies:
        if not knee or keeps(policy, knee):
            knee = _knee_of(lambda load, policy=policy: keeps(policy, load), knee)
    return round(knee, 3)


def _knee_of(keeps: Callable[[float], bool], known: float) -> float:
    """Assumes that a target kept at a load is kept at smaller ones. ``known``: a load at which it is kept, or 0."""
    low = known
    high = known * 2 or 1.0
    while high < KNEE_LOAD_MAX and keeps(high):
        low, high = high, high * 2
    while not low:
        if high < 1 / KNEE_LOAD_MAX or keeps(high / 2):
            low = high / 2
        else:
            high /= 2
    while high / low > KNEE_RATIO:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low
