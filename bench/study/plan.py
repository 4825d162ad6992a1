"""What the placement study runs: workloads x fleets x loads x policies x seeds, in sections of its page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import msgspec

from bench.policies import BATON, BATON_DEFAULT, BATON_STRICT, BATON_WAITING
from bench.study.results import Slo
from bench.study.tuning import Frozen, read_frozen
from bench.study.workloads import NAMES
from replay.split import Split
from services.worker.engines.simulated.core.step_models import StepModelName

LOADS = {"light": 0.5, "knee": 1.0, "overload": 1.3}
"""Of the knee; see ``runs.find_knee``. A made workload's load is its requests per second, a trace's its speed."""
QUICK_REQUESTS = 400
"""Of a workload in a quick study."""
QUICK_SEEDS = 3
WHOLE_REQUESTS, WHOLE_SEEDS = 12_000, 10
"""Of the whole study: an hour of the conversation trace."""
WORKERS = 8
QUICK_WORKLOADS = {"factorial": 1, "step-models": 1, "fleets": 1}
KNEE_SEED = 0
"""Of the search for the knee; not among the seeds that are measured."""
OWN = (BATON, BATON_WAITING, BATON_STRICT, BATON_DEFAULT)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Requests, made by the seed or read from a trace file."""

    name: str
    """Of ``bench.study.workloads``, or of a trace that the command is given."""
    is_trace: bool = False
    is_tuned: bool = False
    """Parameters were chosen on it: what it shows is no evidence for others."""
    requests: int = 1000
    """For ``WORKERS`` workers; larger fleets get more. A trace is cut to them."""

    def count(self, fleet: Fleet) -> int:
        """Requests for this fleet."""
        return max(1, self.requests * len(fleet.split.roles()) // WORKERS)


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Workers by role, and their engines."""

    both: int = 0
    prefill: int = 0
    decode: int = 0
    profile: str = "8b"
    """Of ``replay.profile``."""
    step_model: StepModelName = "linear"
    """How long engine steps take."""
    noise: float = 0.0
    slow: tuple[tuple[int, float], ...] = ()
    """Numbers of workers and their speeds."""
    host_blocks: int = 0
    """Of host memory, for each worker."""

    @property
    def split(self) -> Split:
        """As the replay takes it."""
        return Split(both=self.both, prefill=self.prefill, decode=self.decode)

    @property
    def name(self) -> str:
        """For tables."""
        parts = {"both": self.both, "prefill": self.prefill, "decode": self.decode}
        workers = " + ".join(f"{count} {role}" for role, count in parts.items() if count)
        options = [self.profile]
        options += [self.step_model] if self.step_model != "linear" else []
        options += [f"noise {self.noise:g}"] if self.noise else []
        options += [f"worker {number} at {speed:.0%}" for number, speed in self.slow]
        options += [f"{self.host_blocks} host blocks"] if self.host_blocks else []
        return f"{workers} ({', '.join(options)})"


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """One heading of the page: all its workloads, fleets, loads and policies with each other."""

    title: str
    text: str
    workloads: tuple[Workload, ...]
    fleets: tuple[Fleet, ...]
    loads: tuple[str, ...]
    policies: tuple[str, ...]
    seeds: int = 10
    """Seeds 1, 2, ...: so many."""
    are_tuned: bool = False
    """Policies run with the values of ``bench/study/tuned.json``, which all got with the same budget; otherwise with defaults.
    Baton's own admission has its defaults in any case.
    """

    def seeds_of(self, workload: Workload) -> range:
        return range(1, 1 + (1 if workload.name in SAME_BY_SEED else self.seeds))

    def run_as(self, policy: str) -> str:
        """The policy with the values that it runs with."""
        return frozen().name(policy) if self.are_tuned and policy not in OWN[1:] else policy


@cache
def frozen() -> Frozen:
    """Tuned values of all systems."""
    return read_frozen()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All sections, by short names."""

    sections: dict[str, Section]
    slo: Slo = Slo()


TRACES = (
    Workload(name="mooncake-conversations", is_trace=True, is_tuned=True),
    Workload(name="azure-conversations", is_trace=True, requests=3000),
)
SAME_BY_SEED = ("azure-conversations",)
"""Their arrivals are exact and their prompts share nothing: every seed has the same requests, so there is one seed."""
AGENTS, CODE = Workload(name="agents", requests=2000), Workload(name="code", requests=4000)
TENANTS = Workload(name="tenants", requests=2000)
CONVERSATIONS, REASONING = Workload(name="conversations", requests=6000), Workload(name="reasoning", requests=1500)
MAIN = (*TRACES, AGENTS, CODE, CONVERSATIONS, REASONING)
EIGHT = Fleet(both=8)
RIVALS = ("sglang", "dynamo-queue", "llm-d-flow", "mooncake-rejecting")
UNTOLD_RIVALS = ("sglang", "dynamo-queue", "llm-d", "llm-d-flow", "mooncake")
"""None of them refuses by a target."""
KNEE_OF = ("mooncake-rejecting", "dynamo-queue")
"""The knee is where the better of these no longer keeps the targets; the likelier first, which saves runs."""
ORDERS, REFUSALS = ("", "+fcfs", "+sjf", "+edf"), ("", "+refuse")
FACTORIAL = tuple(
    f"{rule}{order}{refusal}"
    for rule in (BATON, "dynamo", "llm-d-sticky", "mooncake", "sglang")
    for order in ORDERS
    for refusal in REFUSALS
)

PLAN = Plan(
    sections={
        "targets": Section(
            title="With targets",
            text="Every router knows the targets. Rivals are tuned on one trace (`bench/study/tuned.json`), Baton has its defaults.",
            are_tuned=True,
            workloads=MAIN,
            fleets=(EIGHT,),
            loads=tuple(LOADS),
            policies=(BATON_WAITING, *RIVALS),
        ),
        "default": Section(
            title="Default settings, without targets",
            text="No router knows the targets; they are measured all the same. All systems have their default settings.",
            workloads=MAIN,
            fleets=(EIGHT,),
            loads=tuple(LOADS),
            policies=(BATON_DEFAULT, *UNTOLD_RIVALS),
        ),
        "fleets": Section(
            title="Other fleets",
            text="At the knee of each fleet, with the same values.",
            are_tuned=True,
            seeds=3,
            workloads=(TRACES[0], AGENTS, TENANTS),
            fleets=(
                Fleet(both=4),
                Fleet(both=16),
                Fleet(both=64),
                Fleet(prefill=2, decode=2),
                Fleet(prefill=6, decode=10),
                Fleet(both=8, profile="70b"),
            ),
            loads=("knee",),
            policies=(BATON_WAITING, "dynamo-queue", "llm-d-flow", "mooncake-rejecting"),
        ),
        "step-models": Section(
            title="Other engines",
            text="Step times by a roofline and by measured tables, with noise; one slow worker; host memory. At the knee of each.",
            are_tuned=True,
            seeds=3,
            workloads=(TRACES[0], AGENTS),
            fleets=(
                Fleet(both=8, step_model="roofline", noise=0.1),
                Fleet(both=8, step_model="table", noise=0.1),
                Fleet(both=8, noise=0.1, slow=((0, 0.5),)),
                Fleet(both=8, host_blocks=3200),
            ),
            loads=("knee",),
            policies=(BATON_WAITING, "dynamo-queue", "llm-d-flow", "mooncake-rejecting"),
        ),
        "factorial": Section(
            title="Placement x queue x refusal",
            text="Each placement rule at once and with each order of waiting, serving all or refusing what would be late.",
            are_tuned=True,
            seeds=3,
            workloads=(TRACES[0], AGENTS),
            fleets=(EIGHT,),
            loads=("knee", "overload"),
            policies=FACTORIAL,
        ),
    }
)


SMALL_FLEETS = {
    "fleets": (Fleet(both=1), Fleet(prefill=1, decode=2)),
    "step-models": (
        Fleet(both=2, step_model="roofline", noise=0.1),
        Fleet(both=2, step_model="table", noise=0.1),
        Fleet(both=2, slow=((0, 0.5),)),
        Fleet(both=2, host_blocks=800),
    ),
}
"""Of a quick study, by section; elsewhere two workers."""


def quick(plan: Plan) -> Plan:
    """The same sections, small: minutes instead of hours, and wide intervals."""
    sections = {}
    for name, section in plan.sections.items():
        made = [workload for workload in section.workloads if not workload.is_trace][: QUICK_WORKLOADS.get(name, 2)]
        sections[name] = msgspec.structs.replace(
            section,
            workloads=tuple(made),
            fleets=SMALL_FLEETS.get(name, (Fleet(both=2),)),
            policies=(*(one for one in section.policies if one in OWN), *_some(section.policies)),
        )
    return sized(msgspec.structs.replace(plan, sections=sections), QUICK_REQUESTS, seeds_max=QUICK_SEEDS)


def whole(plan: Plan) -> Plan:
    """All workloads, an hour long, and ten seeds in the sections that have the fewest workloads: ten hours of a core."""
    made = tuple(Workload(name=name) for name in NAMES)
    sections = {
        name: msgspec.structs.replace(
            section, workloads=(*TRACES, *made) if section.workloads == MAIN else section.workloads, seeds=WHOLE_SEEDS
        )
        for name, section in plan.sections.items()
    }
    return sized(msgspec.structs.replace(plan, sections=sections), WHOLE_REQUESTS)


def sized(plan: Plan, requests: int = 0, *, seeds_max: int = WHOLE_SEEDS) -> Plan:
    """With so many requests in each workload (0: as planned), and no more seeds than that."""
    sections = {
        name: msgspec.structs.replace(
            section,
            workloads=tuple(
                msgspec.structs.replace(one, requests=requests or one.requests) for one in section.workloads
            ),
            seeds=min(section.seeds, seeds_max),
        )
        for name, section in plan.sections.items()
    }
    return msgspec.structs.replace(plan, sections=sections)


def _some(policies: Sequence[str]) -> list[str]:
    """Those of the knee, or a few others."""
    rivals = [one for one in policies if one not in OWN]
    return [one for one in rivals if one in KNEE_OF] or rivals[:: max(1, len(rivals) // 3)]


def chosen(plan: Plan, only: Sequence[str], traces: Sequence[str]) -> tuple[Plan, list[str]]:
    """The sections to run, and what is left out because its trace was not given."""
    sections, missing = {}, []
    for name, section in plan.sections.items():
        if only and name not in only:
            continue
        kept = tuple(one for one in section.workloads if not one.is_trace or one.name in traces)
        missing += [one.name for one in section.workloads if one not in kept]
        if kept:
            sections[name] = msgspec.structs.replace(section, workloads=kept)
    return msgspec.structs.replace(plan, sections=sections), sorted(set(missing))
