"""Learn what each unit of several kinds of work costs, from how long mixtures of them took.

``seconds = sum(work[i] * cost[i])``. A Kalman filter, linearised at each sample, follows the logarithms of the costs:

* A cost is positive whatever is measured, and noise that grows with the duration is the same for all durations.
* The derivative of log(seconds) by log(cost[i]) is that kind's share of the prediction. The shares add up to one, so an
  error that nothing explains better scales all costs by the same factor: a single sample brings all to the right scale.
* Costs drift at every sample, more together than against each other. So old samples are forgotten, and costs that the
  samples do not tell apart keep the prior's proportions.
* A sample beyond ``CLIPPED_BEYOND`` standard deviations counts as much as one at that limit (Huber), one beyond
  ``IGNORED_BEYOND`` does not count. The standard deviation follows the running median of the errors of its group:
  samples of many short steps scatter less than those of one long step.
* If the last ``CHANGED_AFTER`` errors are all beyond ``IGNORED_BEYOND``, or all but one of the last ``LATEST`` beyond
  ``SHIFTED_BEYOND``, on the same side, they are no outliers: the machine has changed, or an outlier has misled the
  estimate. Then the costs of that group shift together by the common error. Learning from these samples one by one
  would put all of it on the least known cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

Vector = list[float]
Matrix = list[list[float]]

CLIPPED_BEYOND: Final = 1.5
"""Standard deviations."""
MEDIAN_OF_NORMAL: Final = 0.6745
"""Standard deviations within which half of all normal errors are."""
INITIAL_NOISE: Final = 0.3
NOISE_MIN, NOISE_MAX = 0.02, 1.0
NOISE_STEP: Final = 0.05
"""Relative change of the noise by one sample."""
DRIFT_TOGETHER: Final = 2e-4
"""Variance that each sample adds to the logarithms of all costs together."""
DRIFT_APART: Final = 1e-5
IGNORED_BEYOND: Final = 3.0
CHANGED_AFTER: Final = 5
"""With one outlier in ten samples, five in a row are one case in 100,000; so are six of seven (``LATEST``)."""
LATEST, SHIFTED_BEYOND = 7, 1.0
LOG_COST_MIN, LOG_COST_MAX = math.log(1e-15), math.log(1e4)
SECONDS_MIN, SECONDS_MAX = 1e-7, 1e6
"""A duration outside of these is a measuring error."""


class Prior:
    """What is assumed before the first sample. Costs of one group are of one kind of work, and vary together."""

    __slots__ = ("covariance", "drift", "groups", "logs", "variance")

    def __init__(self, costs: Sequence[float], groups: Sequence[int], *, together: float, apart: float) -> None:
        """``together`` and ``apart``: variances of the logarithms, of a group's costs in common and of each alone."""
        self.logs: Vector = list(map(math.log, costs))
        self.groups: Matrix = [[float(one == other) for other in groups] for one in groups]
        self.covariance = self.varied(together, apart)
        self.variance = (together + apart) * len(costs)
        self.drift = self.varied(DRIFT_TOGETHER, DRIFT_APART)

    def varied(self, together: float, apart: float) -> Matrix:
        """The covariance of logarithms with these variances, of a group's costs in common and of each alone."""
        return [
            [together * same + (apart if row == column else 0.0) for column, same in enumerate(group)]
            for row, group in enumerate(self.groups)
        ]


class UnitCosts:
    """The costs of one machine, or of all that are alike."""

    __slots__ = ("_covariance", "_latest", "_logs", "_measured", "_noise", "_prior", "samples", "settled")

    def __init__(self, prior: Prior) -> None:
        self.samples = 0
        self.settled = 0
        """Samples since the last shift or ignored sample."""
        self._prior = prior
        self._logs = prior.logs
        self._covariance = prior.covariance
        self._measured: Vector = [0.0] * len(prior.logs)
        self._noise = [INITIAL_NOISE] * len(prior.logs)
        """Standard deviation of the errors of a group, at the place of its first kind."""
        self._latest: dict[int, list[float]] = {}
        """Errors, by the kind of work with the largest share."""

    def like(self, together: float, apart: float) -> UnitCosts:
        """Costs of another machine that is assumed to differ from this one by so much variance."""
        made = UnitCosts(self._prior)
        made._logs, made._noise = self._logs, list(self._noise)
        made._covariance = _sum(self._covariance, self._prior.varied(together, apart))
        return made

    def values(self) -> list[float]:
        """Seconds for one unit of each kind."""
        return list(map(math.exp, self._logs))

    def _parts(self, work: Sequence[float]) -> Vector:
        """Seconds of each kind in so much work."""
        return [math.exp(log) * work[number] for number, log in enumerate(self._logs)]

    def spread(self, work: Sequence[float]) -> float:
        """Standard deviation of the logarithm of what so much work takes."""
        parts = self._parts(work)
        whole = sum(parts)
        shares = [part / whole for part in parts]
        return math.sqrt(max(0.0, _dot(_times(self._covariance, shares), shares)))

    @property
    def measured(self) -> list[float]:
        """Sum of the shares of each kind in all samples."""
        return self._measured

    def learn(self, work: Sequence[float], seconds: float) -> bool:
        """So much work took so long. Returns False for impossible samples, which change nothing."""
        parts = self._parts(work)
        predicted = sum(parts)
        if not (SECONDS_MIN <= seconds <= SECONDS_MAX and 0.0 < predicted < math.inf and min(work) >= 0.0):
            return False
        self.samples += 1
        self.settled += 1
        shares = [part / predicted for part in parts]
        self._measured = _plus(self._measured, shares, 1.0)
        along = _times(self._covariance, shares)
        uncertainty = max(0.0, _dot(along, shares))
        error = math.log(seconds / predicted)
        group = self._prior.groups[shares.index(max(shares))].index(1.0)
        noise = self._noise[group] ** 2
        surprise = abs(error) / math.sqrt(uncertainty + noise)
        if surprise > IGNORED_BEYOND and self.samples > 1:
            self.settled = 0
        else:
            self._move(along, error, uncertainty + noise * max(1.0, surprise / CLIPPED_BEYOND))
        self._remember(shares, group, error, math.sqrt(uncertainty + noise))
        return True

    def _remember(self, shares: Vector, group: int, error: float, expected: float) -> None:
        latest = self._latest.setdefault(shares.index(max(shares)), [])
        latest.append(error)
        from_median = abs(error - sorted(latest)[len(latest) // 2])
        step = NOISE_STEP if from_median > MEDIAN_OF_NORMAL * expected else -NOISE_STEP
        self._noise[group] = min(max(self._noise[group] * (1.0 + step), NOISE_MIN), NOISE_MAX)
        common = _common(latest, expected)
        if common:
            self._shift(shares, common, self._noise[group] ** 2)
            latest.clear()
        elif len(latest) == LATEST:
            del latest[0]

    def _shift(self, shares: Vector, error: float, noise: float) -> None:
        """Move all costs of the groups in the last sample. ``noise``: the variance of the error."""
        self.settled = 0
        moved = _times(self._prior.groups, shares)
        self._logs = list(map(_bounded, _plus(self._logs, moved, error)))
        self._covariance = _plus_outer(self._covariance, moved, noise)

    def _move(self, along: Vector, error: float, total: float) -> None:
        self._logs = list(map(_bounded, _plus(self._logs, along, error / total)))
        self._covariance = _plus_outer(self._covariance, along, -1.0 / total)
        if sum(row[number] for number, row in enumerate(self._covariance)) < self._prior.variance:
            self._covariance = _sum(self._covariance, self._prior.drift)


def _bounded(log: float) -> float:
    return min(max(log, LOG_COST_MIN), LOG_COST_MAX)


# A few numbers each: numpy takes several times as long.


def _dot(one: Vector, other: Vector) -> float:
    total = 0.0
    for number in range(len(one)):
        total += one[number] * other[number]
    return total


def _plus(one: Vector, other: Vector, factor: float) -> Vector:
    """One and ``factor`` times the other."""
    return [value + factor * other[number] for number, value in enumerate(one)]


def _times(matrix: Matrix, vector: Vector) -> Vector:
    return [_dot(row, vector) for row in matrix]


def _sum(one: Matrix, other: Matrix) -> Matrix:
    return [_plus(row, other[number], 1.0) for number, row in enumerate(one)]


def _plus_outer(matrix: Matrix, vector: Vector, factor: float) -> Matrix:
    """The matrix and ``factor`` times the outer product of the vector with itself."""
    return [_plus(row, vector, factor * vector[number]) for number, row in enumerate(matrix)]


def _common(errors: list[float], expected: float) -> float:
    """What the errors have in common, if that cannot be chance; else 0."""
    if len(errors) >= CHANGED_AFTER:
        ordered = sorted(errors[-CHANGED_AFTER:])
        common = max(ordered[0], 0.0) + min(ordered[-1], 0.0)
        if abs(common) > IGNORED_BEYOND * expected:
            return common
    if len(errors) < LATEST:
        return 0.0
    ordered = sorted(errors)
    common = max(ordered[1], 0.0) + min(ordered[-2], 0.0)
    return common if abs(common) > SHIFTED_BEYOND * expected else 0.0
