"""Finds the split that carries the most load, what limits it, and the smallest fleet that carries the load at all.

Splits are compared by the largest multiple of the load at which enough requests are in time. One split is the best so
far. Others are simulated just beyond its limit: those that fail there are beaten after one simulation; one that does
not becomes the best, and its own limit is found by bisection. Which splits are tried follows a pattern search: a few to
begin with, then those that differ from the best by moving workers to another role, in steps that become smaller.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable

import msgspec

from replay.capacity.trial import Question, Resource, Runner, Trial
from replay.split import Split

PRECISION = 1.03
"""Precision of a limit: at this multiple of the load that is kept, too many requests are late."""
COARSE = 1.15
"""Precision of the limit of a split that may not be the last best one."""
FAR, NEAR = 2.0, 1.3
"""Steps to the next load to try: without knowledge, and just beyond the limit of another split."""
LOAD_MAX = 256.0
LOAD_MIN = 1 / 64
BEYOND = 1.1
"""Multiple of its limit at which a fleet is examined for what limits it."""
SIZE_MAX = 1024
GAIN_MIN = 0.005
"""Share of the requests by which twice as much of a resource must help to be what limits a fleet."""

EACH_ONE = Split(1, 1, 1)


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """How much load a split carries, as a multiple of the workload's."""

    split: Split
    keeps: float
    """The largest multiple at which enough requests were in time; 0: none was found."""
    fails: float
    """The smallest tried multiple at which too few requests were in time; infinite: none was found."""
    beaten: bool = False
    """Whether the search stopped once the split was worse than the best one; ``keeps`` may then be larger."""


class Bottleneck(msgspec.Struct, frozen=True, kw_only=True):
    """What happens just beyond the limit of a split, and with twice as much of one resource."""

    load: float
    in_time: float
    """Share of requests in time with unchanged engines."""
    with_twice: dict[str, float]
    """Share of requests in time, by the doubled resource."""
    resource: str
    """The resource that helps most; empty: none helps."""


class Search:
    """One search. ``phase`` is told what it does and about how many simulations that takes. ``cost``: what one worker
    of each role takes of a fleet's size; where all take 1, that is the number of workers.
    """

    def __init__(
        self, runner: Runner, phase: Callable[[str, int], None] = lambda _what, _count: None, cost: Split = EACH_ONE
    ) -> None:
        self._cost = cost
        self.limits: dict[Split, Limit] = {}
        self._runner = runner
        self._share = runner.case.target.share
        self._phase = phase

    # Splits of one fleet.

    def best_split(self, size: int, only: Iterable[Split] = ()) -> Limit:
        """The split of a fleet of this size that carries the most load; ``only``: among these."""
        chosen = list(dict.fromkeys(only))
        first = chosen or first_splits(size, self._cost)
        self._phase(f"comparing {len(first)} splits", len(first))
        trials = self._runner.ask(Question(split) for split in first)
        best = min(trials, key=rank).split
        self._phase(f"how much {best} carries", 8)
        limit = self._limit_of(best, 0.0, COARSE)
        step = 0 if chosen else largest_step(size)
        candidates = set(first)
        while True:
            if step:
                candidates |= set(neighbours(limit.split, step, size, self._cost))
            better = self._challenge(candidates, limit)
            if better is not None:
                limit = better
            elif step > 1:
                step //= 2
            elif 0 < limit.keeps * PRECISION < limit.fails < math.inf:
                limit = self._limit_of(limit.split, limit.keeps)  # and once more against the others
            else:
                return limit

    def _challenge(self, candidates: set[Split], best: Limit) -> Limit | None:
        """The limit of one that carries more than the best so far, or None."""
        load = best.fails  # What keeps it is better; below, both might be.
        if math.isinf(load):
            return None
        splits = sorted(one for one in candidates if one != best.split and not self._is_beaten(one, load))
        if not splits:
            return None
        self._phase(f"looking for a better split than {best.split}", len(splits))
        trials = self._runner.ask(Question(split, load) for split in splits)
        for trial in trials:
            if not trial.keeps(self._share):
                self.limits[trial.split] = Limit(split=trial.split, keeps=0.0, fails=load, beaten=True)
        winner = min(trials, key=rank)
        if not winner.keeps(self._share):
            return None
        self.limits[best.split] = best
        self._phase(f"how much {winner.split} carries", 5)
        return self._limit_of(winner.split, load, COARSE, NEAR)

    def _is_beaten(self, split: Split, load: float) -> bool:
        known = self.limits.get(split)
        return known is not None and known.fails <= load

    def _limit_of(self, split: Split, keeps: float, precision: float = PRECISION, step: float = FAR) -> Limit:
        """Find the limit by bisection, with as many loads at a time as there are processes. ``keeps``: a load known to
        be kept.
        """
        low, high = keeps, math.inf
        for load, trial in self._tried(split):
            if trial.keeps(self._share):
                low = max(low, load)
        for load, trial in self._tried(split):
            if load > low and not trial.keeps(self._share):
                high = min(high, load)
        while loads := next_loads(low, high, self._runner.jobs, precision, step):
            trials = self._runner.ask(Question(split, load) for load in loads)
            for load, trial in zip(loads, trials, strict=True):
                if not trial.keeps(self._share):
                    high = load
                    break
                low = load
        self.limits[split] = Limit(split=split, keeps=low, fails=high)
        return self.limits[split]

    def _tried(self, split: Split) -> list[tuple[float, Trial]]:
        return [(one.load, trial) for one, trial in self._runner.trials.items() if one == Question(split, one.load)]

    def at_the_load(self) -> dict[Split, Trial]:
        """All splits whose limits were examined, at the workload's own load."""
        splits = sorted(self.limits)
        missing = sum(Question(split) not in self._runner.trials for split in splits)
        self._phase("each split at this load", missing)
        return dict(zip(splits, self._runner.ask(Question(split) for split in splits), strict=True))

    def limits_of(self, splits: list[Split]) -> None:
        """Find the limits of splits that were only beaten, or examined roughly."""
        rough = [split for split in splits if self.limits[split].fails > self.limits[split].keeps * PRECISION]
        self._phase("how much the next best carry", 5 * len(rough))
        for split in rough:
            self._limit_of(split, 0.0)

    # What limits a split.

    def bottleneck(self, limit: Limit) -> Bottleneck | None:
        """None where the limit is not known."""
        if not limit.keeps or not math.isfinite(limit.fails):
            return None
        load = limit.keeps * BEYOND
        self._phase(f"what limits {limit.split}", 1 + len(Resource))
        changes = [None, *Resource]
        trials = self._runner.ask(Question(limit.split, load, change, to_the_end=True) for change in changes)
        shares = {change: trial.in_time for change, trial in zip(changes, trials, strict=True)}
        as_is = shares.pop(None)
        most = max(shares, key=lambda change: shares[change])
        return Bottleneck(
            load=load,
            in_time=as_is,
            with_twice={change.value: share for change, share in shares.items() if change is not None},
            resource=most.value if most is not None and shares[most] >= as_is + GAIN_MIN else "",
        )

    # The smallest fleet.

    def smallest(self, like: Limit | None) -> Trial | None:
        """The smallest fleet that keeps the targets at this load, or None if one of ``SIZE_MAX`` does not. ``like``:
        the best split of a fleet, whose proportions are tried.
        """
        self._phase("the smallest fleet", 6)
        guess = math.ceil(like.split.times(self._cost) / like.keeps) if like is not None and like.keeps else 1
        low, high = 0, 0
        found: Trial | None = None
        size = max(1, min(guess, SIZE_MAX))
        while not high or high - low > 1:
            trial = self._kept_by(size, like.split if like is not None else None)
            if trial is not None:
                found, high = trial, size
            else:
                low = size
            if not high:
                if size >= SIZE_MAX:
                    return None
                # A guess is off by little; without one, the fleet doubles.
                size = min(SIZE_MAX, size + max(1, size // 8) if guess > 1 else 2 * size)
            elif not low and guess > 1:
                size = max(1, high - max(1, high // 8))
                if high == 1:
                    break
            else:
                size = (low + high) // 2
        return found

    def _kept_by(self, size: int, like: Split | None) -> Trial | None:
        trials = self._runner.ask(Question(split) for split in alike(size, like, self._cost))
        best = min(trials, key=rank, default=None)
        return best if best is not None and best.keeps(self._share) else None

    def whole(self, split: Split) -> Trial:
        """All requests of the workload, at its own load."""
        self._phase("the whole workload", 1)
        return self._runner.ask([Question(split, whole=True)])[0]


def rank(trial: Trial) -> tuple[float, float, float]:
    """Smaller is better: more requests in time, then first tokens that come earlier."""
    return -round(trial.in_time, 3), trial.ttft.p95, trial.ttft.mean


def next_loads(low: float, high: float, count: int, precision: float = PRECISION, step: float = FAR) -> list[float]:
    """Loads to try, in ascending order; none when the limit is known. ``low`` 0 and ``high`` infinite: unknown."""
    if math.isinf(high):
        if not low:
            return [float(2**power) for power in range(count)]
        return [load for power in range(1, count + 1) if (load := low * step**power) <= LOAD_MAX]
    if not low:
        return sorted(load for power in range(1, count + 1) if (load := high / 2**power) >= LOAD_MIN)
    if high / low <= precision:
        return []
    ratio = (high / low) ** (1 / (count + 1))
    return [low * ratio**power for power in range(1, count + 1)]


def first_splits(size: int, cost: Split = EACH_ONE) -> list[Split]:
    """Workers for both, and some proportions of prefill and decode workers with and without them."""
    parts = (1, 2, 3)
    prefill = [max(1, round(size * part / 4 / cost.prefill)) for part in parts]
    decode = max(1, round(size / 4 / cost.decode))
    splits = [Split(both=size // cost.both)]
    splits += [Split(prefill=count, decode=(size - count * cost.prefill) // cost.decode) for count in prefill]
    splits += [
        Split(prefill=prefill[0], both=(size - prefill[0] * cost.prefill) // cost.both),
        Split(decode=decode, both=(size - decode * cost.decode) // cost.both),
    ]
    return [one for one in dict.fromkeys(splits) if one.can_serve]


def largest_step(size: int) -> int:
    """How much of a fleet changes its role at once, at first: a power of two."""
    return 1 << max(0, (size // 4).bit_length() - 1)


def neighbours(split: Split, step: int, size: int, cost: Split = EACH_ONE) -> list[Split]:
    """Splits where workers that take ``step``, or as many as make room for one, have another role."""
    costs = cost.counts
    found = []
    for source, target in itertools.permutations(range(3), 2):
        moved = list(split.counts)
        missing = costs[target] - (size - split.times(cost))
        moved[source] -= max(1, step // costs[source], -(-missing // costs[source]))
        moved[target] += (size - Split(*moved).times(cost)) // costs[target]
        found.append(Split(*moved))
    return [one for one in found if one.can_serve]


def alike(size: int, like: Split | None, cost: Split = EACH_ONE) -> list[Split]:
    """Splits of a fleet of this size to try: for both, and in the proportions of another fleet."""
    if like is None:
        return first_splits(size, cost)
    scale = size / like.times(cost)
    prefill, decode = like.prefill * scale, like.decode * scale
    splits = [Split(both=size // cost.both)]
    for first, second in itertools.product(
        {math.floor(prefill), math.ceil(prefill)}, {math.floor(decode), math.ceil(decode)}
    ):
        rest = size - Split(first, second).times(cost)
        more, both = (0, rest // cost.both) if like.both else (rest // cost.decode, 0)
        splits.append(Split(first, second + more, both))
    return [one for one in dict.fromkeys(splits) if one.can_serve]
