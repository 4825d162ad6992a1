"""The plan: which split of how many workers, how far it is from its limit, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from replay.capacity.layouts import Layout
from replay.capacity.search import Bottleneck, Limit, Search, rank
from replay.capacity.trial import Case, Runner, Target, Trial, alone_s, fits
from replay.capacity.workload import Summary, Workload, busiest, seen_before, summary_of
from replay.profile import Profile
from replay.split import LETTERS, Split
from replay.traces import Request
from shared.contracts.workers import Role
from shared.text.formats import duration

ROLES = tuple(Role(role) for role in LETTERS.values())
ROUNDING = 1e-9
"""Tolerance of the share: 1 - 0.95 is a little more than 0.05 in floating point."""
NAMED_MAX = 3
"""Requests that a message names."""
RUNNERS_UP = 2
"""Splits beside the best whose limits are found, too."""
STEADY_TIMES = 5.0
"""A load shorter than so many of its mean requests may end before the engines are as busy as it would make them."""


class Impossible(ValueError):
    """No fleet of these engines meets the targets; the message says which requests miss them."""


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan takes an engine to be."""

    name: str
    """Name of the profile, or of the model whose measured speeds are used."""
    measured: bool
    gpus: int
    """GPUs of one worker, or of one data parallel group."""
    layout: Layout
    prompt_s: float
    """Time to compute the mean prompt alone."""
    kv_tokens: int
    """Size of the KV cache, or of those of all ranks of a data parallel group."""
    state_tokens: int
    """Tokens for which there would be room where the states of one running request are."""
    handoff_bytes: int
    """Bytes of the mean prompt's KV, with windows and states."""


class SplitResult(msgspec.Struct, frozen=True, kw_only=True):
    """A split that was tried."""

    split: Split
    limit: Limit
    at_load: Trial


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All results. Multiples are of the workload's own load."""

    workload: str
    size: Summary
    """Size of the whole workload."""
    searched: Summary
    """Size of the piece that the search simulated."""
    target: Target
    engines: dict[str, Engine]
    """The engines that a worker of each role has."""
    workers: int
    """Workers of the best split. A data parallel group counts as one."""
    splits: list[SplitResult]
    """Results of all splits, the best one first."""
    enough: bool
    """Whether these workers keep the targets at the workload's own load."""
    headroom: float
    """The largest multiple at which the best split keeps them."""
    bottleneck: Bottleneck | None
    smallest: Trial | None
    """The smallest fleet that keeps the targets; None: none was found."""
    whole: Trial | None
    """The best split under the whole workload, where the search used a piece of it."""
    trials: list[Trial]
    """All simulations with unchanged engines, for the picture."""
    notes: list[str]
    """What the reader should know about the inputs."""

    def gpus_of(self, split: Split) -> int:
        """GPUs of all its workers."""
        return split.times(Split(**{role: engine.gpus for role, engine in self.engines.items()}))

    @property
    def best(self) -> SplitResult:
        """The recommended split."""
        return self.splits[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What to plan for."""

    workload: Workload
    profile: Profile
    engine: str
    """Name of the profile or model."""
    measured: bool
    gpus_per_worker: int
    target: Target
    sample: int
    """Requests of the piece to search with; 0: all."""
    by_role: Mapping[Role, Profile] = field(default_factory=dict)
    """Engines of a role that are not as ``profile``."""
    layouts: Mapping[Role, Layout] = field(default_factory=dict)
    """Layouts of the roles in ``by_role``. An engine of another role has one stage on ``gpus_per_worker``."""

    def profile_of(self, role: Role) -> Profile:
        return self.by_role.get(role, self.profile)

    def layout_of(self, role: Role) -> Layout:
        return self.layouts.get(role, Layout(tensor=self.gpus_per_worker))

    @property
    def unit(self) -> int:
        """GPUs in which the size of a fleet is counted: those of a worker where all have as many."""
        return math.gcd(*(self.layout_of(role).gpus for role in ROLES))

    @property
    def cost(self) -> Split:
        """The size of a worker of each role."""
        return Split(**{role.value: self.layout_of(role).gpus // self.unit for role in ROLES})

    def fits(self, request: Request) -> bool:
        """Whether the engines of each role have room for it."""
        return all(fits(request, profile) for profile in {self.profile_of(role) for role in ROLES})


def case_of(inputs: Inputs) -> tuple[Case, list[str]]:
    """What is simulated, and notes. Raises Impossible."""
    whole = [request for request in inputs.workload.requests if inputs.fits(request)]
    notes = [inputs.workload.note] if inputs.workload.note else []
    notes += check(inputs)
    piece = busiest(inputs.workload.requests, inputs.sample)
    fitting = [request for request in piece if inputs.fits(request)]
    case = Case(
        requests=fitting,
        whole=whole,
        too_large=len(piece) - len(fitting),
        whole_too_large=len(inputs.workload.requests) - len(whole),
        profile=inputs.profile,
        by_role=inputs.by_role,
        target=inputs.target,
    )
    return case, notes


def check(inputs: Inputs) -> list[str]:
    """Notes about requests that miss a target even alone. Raises Impossible when these are more than may miss it."""
    requests, target = inputs.workload.requests, inputs.target
    profiles = [inputs.profile_of(role) for role in ROLES]
    times = [
        [alone_s(request, tokens, profile) for profile in dict.fromkeys(profiles)]
        for request, tokens in zip(requests, seen_before(requests), strict=True)
    ]
    first_s = [min(first for first, _ in each) for each in times]
    between_s = [min(between for _, between in each) for each in times]
    large = [number for number, request in enumerate(requests) if not inputs.fits(request)]
    late = [number for number, seconds in enumerate(first_s) if seconds > target.ttft_s]
    slow = [number for number, seconds in enumerate(between_s) if seconds > target.itl_s]
    kv_tokens = min(profile.kv_blocks // profile.data_ranks * profile.block_tokens for profile in profiles)
    of = partial(_named, requests)
    notes = []
    if large:
        notes.append(f"{of(large)} do not fit into the KV cache of an engine ({kv_tokens:,} tokens).")
    if late:
        longest = duration(max(first_s))
        notes.append(f"{of(late)} miss {target.ttft_s:g} s even alone on an idle engine: the longest takes {longest}.")
    if slow:
        slowest, allowed = duration(max(between_s)), duration(target.itl_s)
        notes.append(f"{of(slow)} miss {allowed} between tokens even alone on an idle engine: at worst {slowest}.")
    missed = len({*large, *late, *slow})
    if missed > (1 - target.share) * len(requests) + ROUNDING:
        possible = f"{1 - missed / len(requests):.1%} of the requests at most, and {target.share:.4g} are wanted"
        options = f"--ttft {_needed(first_s, target.share)} and --itl {_needed(between_s, target.share)}"
        reason = f"No fleet of these engines meets the targets: {possible}."
        raise Impossible(" ".join([reason, *notes, f"Idle engines would do with {options}; a load needs more."]))
    return notes


def _named(requests: list[Request], numbers: list[int]) -> str:
    named = [
        f"request {number + 1} with {requests[number].input_tokens:,} + {requests[number].output_tokens:,} tokens"
        for number in numbers[:NAMED_MAX]
    ]
    names = ", ".join(named) + (", ..." if len(numbers) > NAMED_MAX else "")
    return f"{len(numbers):,} of {len(requests):,} requests ({len(numbers) / len(requests):.1%}: {names})"


def _needed(seconds: list[float], share: float) -> str:
    """What so large a share would meet, rounded up to two digits."""
    value = sorted(seconds)[min(len(seconds) - 1, math.ceil(share * len(seconds)) - 1)]
    digits = 1 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{math.ceil(value * 10**digits) / 10**digits:g}"


def make_plan(
    inputs: Inputs,
    case_notes: list[str],
    runner: Runner,
    size: int,
    only: Iterable[Split] = (),
    phase: Callable[[str, int], None] = lambda _what, _count: None,
) -> Plan:
    """Search. ``size``: workers, or where roles have different layouts the GPUs in ``inputs.unit``; 0: the smallest
    fleet that keeps the targets. Raises Impossible if none does.
    """
    search, cost = Search(runner, phase, inputs.cost), inputs.cost
    smallest = None
    if not size:
        smallest = search.smallest(None)
        if smallest is None:
            raise Impossible("No fleet up to the largest that is tried keeps the targets at this load.")
        size = smallest.split.times(cost)
    limit = search.best_split(size, only)
    at_load = search.at_the_load()
    others = sorted((trial for one, trial in at_load.items() if one != limit.split), key=rank)
    search.limits_of([trial.split for trial in others[:RUNNERS_UP]])
    bottleneck = search.bottleneck(limit)
    smallest = smallest or search.smallest(limit)
    as_large = smallest is not None and smallest.split.times(cost) >= limit.split.times(cost)
    if as_large and at_load[limit.split].keeps(inputs.target.share):
        smallest = at_load[limit.split]
    piece = len(runner.case.requests) < len(runner.case.whole)
    splits = [SplitResult(split=one, limit=search.limits[one], at_load=trial) for one, trial in at_load.items()]
    plain = [trial for question, trial in runner.trials.items() if question.more_of is None and not question.whole]
    return Plan(
        workload=inputs.workload.name,
        size=summary_of(inputs.workload.requests),
        searched=summary_of(runner.case.requests),
        target=inputs.target,
        engines={role.value: engine_of(inputs, role) for role in ROLES},
        workers=limit.split.workers,
        splits=sorted(splits, key=lambda one: order_of(one, limit.split)),
        enough=at_load[limit.split].keeps(inputs.target.share),
        headroom=limit.keeps,
        bottleneck=bottleneck,
        smallest=smallest,
        whole=search.whole(limit.split) if piece else None,
        trials=plain,
        notes=[*case_notes, *steady_note(runner.case, plain, limit)],
    )


def order_of(result: SplitResult, best: Split) -> tuple[bool, float, float, Split]:
    """The best one first, then by how they serve the workload as it is."""
    return result.split != best, -round(result.at_load.in_time, 3), result.at_load.ttft.p95, result.split


def steady_note(case: Case, trials: list[Trial], limit: Limit) -> list[str]:
    """A warning where the load near the limit is too short."""
    near = next((one for one in trials if one.split == limit.split and one.load == limit.keeps), None)
    if near is None:
        return []
    output_tokens = sum(request.output_tokens for request in case.requests) / len(case.requests)
    mean_s = near.ttft.mean + near.itl.mean * output_tokens
    if near.seconds >= STEADY_TIMES * mean_s:
        return []
    lasts = f"At the limit the load lasts {duration(near.seconds)} and a request {duration(mean_s)}"
    return [f"{lasts}: too short for a steady state, so the limit is an upper bound. Use a longer trace or sample."]


def engine_of(inputs: Inputs, role: Role) -> Engine:
    """For the report."""
    requests, profile = inputs.workload.requests, inputs.profile_of(role)
    others = profile.other_groups
    mean = round(sum(request.input_tokens for request in requests) / len(requests))
    return Engine(
        name=inputs.engine,
        measured=inputs.measured,
        gpus=inputs.layout_of(role).gpus,
        layout=inputs.layout_of(role),
        prompt_s=profile.prompt_s(mean, 0),
        kv_tokens=profile.kv_blocks * profile.block_tokens,
        state_tokens=others.states * profile.block_tokens if others is not None else 0,
        handoff_bytes=mean * profile.kv_bytes_per_token + profile.boundary_bytes,
    )
