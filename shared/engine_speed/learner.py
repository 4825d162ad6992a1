"""A worker learns how fast its engine is from the engine's own step totals, and publishes the estimate.

The seconds that one leg reports of its prompt do not measure that prompt: its steps are shared with other prompts and
with decoding, for a short prompt up to twenty times its own work, and more so on a busier worker. The same holds
for the time between tokens. Step totals do not have this problem: the work between two totals, whatever was batched
together, took exactly the seconds between them, and idle time does not count.

Steps that compute prompts are samples of their own. Mixed with the decode steps between them, which take longer
together, they would say little of a prompt: then a start that was five times wrong is never corrected.

Readers (routers, the planner, the disaggregation report) combine what the workers of one fingerprint publish.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from msgspec.structs import astuple, replace

from shared.contracts.load import NO_STEP_TOTALS, EngineSpeed, StepTotals
from shared.engine_speed.steps import DEFAULT_STEP_TIMES, PendingSteps, Steps, StepTimeModel, by_field
from shared.engine_speed.unit_costs import Prior, UnitCosts

PREFILL, DECODE = slice(0, 3), slice(3, 6)
"""The parameters of each phase in ``StepTimeModel``."""
PHASES = (
    (*StepTimeModel._fields[PREFILL], "prefill_samples", "pairs_per_token"),
    (*StepTimeModel._fields[DECODE], "decode_samples", "batch_spread"),
)
"""The fields of ``EngineSpeed`` that belong to prefill and to decode."""
PRIOR = Prior(DEFAULT_STEP_TIMES, [0, 0, 0, 1, 1, 1], together=3.0, apart=1.0)
SAMPLE_S_MIN = 0.02
"""A shorter sample measures the clock rather than the engine; its steps go into the next one."""
YOUNG_SAMPLES, LATER_SAMPLE_S = 50, 1.0
"""Count of samples without a change that settle the estimate, and the length of samples from then on: fewer and longer
ones do."""
MEASURED_MIN = 0.5
"""Samples' worth of a phase before its parameters count as measured."""
AVERAGE_STEP = 0.1
SAMPLES_MAX = 100.0
"""More samples give an engine no more weight among those like it."""


class Source:
    """A kind of steps that samples are made of."""

    __slots__ = ("pending", "settled")

    def __init__(self) -> None:
        self.pending = PendingSteps()
        self.settled = 0
        """Samples since the last one that did not fit the estimate."""

    def sample(self, totals: StepTotals) -> Steps | None:
        """All of these steps since the last sample, once they took long enough."""
        return self.pending.sample(totals, SAMPLE_S_MIN if self.settled < YOUNG_SAMPLES else LATER_SAMPLE_S)


class SpeedLearner:
    """The estimate of one life of one engine. A sample costs about 15 microseconds."""

    __slots__ = ("_context", "_costs", "_pairs", "_prompts", "_rest", "_speed")

    def __init__(self) -> None:
        self._prompts, self._rest = Source(), Source()
        self._costs = UnitCosts(PRIOR)
        self._pairs = self._context = 0.0
        """Moving averages: pairs of a computed prompt token, context tokens of a decoded request."""
        self._speed: EngineSpeed | None = None

    @property
    def speed(self) -> EngineSpeed | None:
        """The estimate; None before the first sample."""
        return self._speed

    def observe(self, totals: StepTotals, prompts: StepTotals = NO_STEP_TOTALS) -> bool:
        """Learn from the engine's totals so far; returns whether they made a sample. ``prompts``: the part of them in
        steps that computed prompts, as far as the engine tells them apart.
        """
        made = False
        for source, part in ((self._prompts, prompts), (self._rest, by_field(operator.sub, totals, prompts))):
            done = source.sample(part)
            if done is not None and self.learn(done):
                source.settled = source.settled + 1 if self._costs.settled else 0
                made = True
        return made

    def learn(self, done: Steps) -> bool:
        """Learn from some steps; returns False for impossible ones, which change nothing."""
        if not self._costs.learn(done.work(), done.seconds):
            return False
        if done.prefill_tokens:
            self._pairs = _average(self._pairs, done.prefill_pairs / done.prefill_tokens)
        if done.decode_requests:
            self._context = _average(self._context, done.decode_context_tokens / done.decode_requests)
        self._speed = self._estimate()
        return True

    def _estimate(self) -> EngineSpeed:
        measured = self._costs.measured
        return EngineSpeed(
            **StepTimeModel(*self._costs.values())._asdict(),
            prefill_samples=sum(measured[PREFILL]),
            decode_samples=sum(measured[DECODE]),
            batch_spread=self._costs.spread(Steps(decode_requests=1.0, decode_context_tokens=self._context).work()),
            pairs_per_token=self._pairs,
        )


def _average(before: float, value: float) -> float:
    return before + AVERAGE_STEP * (value - before) if before else value


def is_valid(speed: EngineSpeed) -> bool:
    """Whether a published estimate can be computed with: all numbers are finite, and no work is free."""
    return all(0.0 < one < math.inf for one in StepTimeModel.of(speed)) and all(
        0.0 <= one < math.inf for one in astuple(speed)
    )


def is_measured(speed: EngineSpeed) -> tuple[bool, bool]:
    """Whether the prefill and the decode parameters rest on samples; otherwise they are the prior's."""
    return speed.prefill_samples >= MEASURED_MIN, speed.decode_samples >= MEASURED_MIN


def filled_in(own: EngineSpeed | None, like: EngineSpeed | None) -> EngineSpeed | None:
    """``own``, where a phase that it has not measured is taken from ``like``, the speed of workers like it."""
    if own is None or like is None:
        return own or like
    missing = [name for phase, names in zip(is_measured(own), PHASES, strict=True) if not phase for name in names]
    return replace(own, **{name: getattr(like, name) for name in missing}) if missing else own


def settled_only(speed: EngineSpeed) -> EngineSpeed:
    """Without a phase that rests on few samples: a slow moment may have spoiled them."""
    phases = (speed.prefill_samples, speed.decode_samples)
    prefill, decode = (samples if samples >= YOUNG_SAMPLES else 0.0 for samples in phases)
    return replace(speed, prefill_samples=prefill, decode_samples=decode)


def combined(speeds: Sequence[EngineSpeed]) -> EngineSpeed | None:
    """One estimate for engines that are alike: of each phase the geometric mean, weighted by samples."""
    if not speeds:
        return None
    times: list[float] = []
    for phase, names in enumerate((StepTimeModel._fields[PREFILL], StepTimeModel._fields[DECODE])):
        some = [one for one in speeds if is_measured(one)[phase]] or speeds
        weights = [min((one.prefill_samples, one.decode_samples)[phase], SAMPLES_MAX) or 1.0 for one in some]
        for name in names:
            logs = (weight * math.log(getattr(one, name)) for one, weight in zip(some, weights, strict=True))
            times.append(math.exp(sum(logs) / sum(weights)))
    prefill_samples = sum(one.prefill_samples for one in speeds)
    return EngineSpeed(
        **StepTimeModel(*times)._asdict(),
        prefill_samples=prefill_samples,
        decode_samples=sum(one.decode_samples for one in speeds),
        # All share the prior, so their errors are not independent: no less than that of the best-known engine.
        batch_spread=min(one.batch_spread for one in speeds),
        pairs_per_token=sum(one.pairs_per_token * one.prefill_samples for one in speeds) / (prefill_samples or 1.0),
    )
