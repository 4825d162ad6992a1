"""Learn what each unit of some kinds of work costs, from how long mixtures of them took.

``seconds = sum(work[i] * speed[i])``. What is followed are the logarithms of the speeds, by a Kalman filter that is
linearised at each sample:

* A speed is positive whatever is measured, and noise that grows with the duration is the same for all durations.
* The derivative of log(seconds) by log(speed[i]) is that kind's share in the prediction. The shares add up to one, so
  an error that nothing explains better scales all speeds by the same factor: a single sample makes sense of them all.
* Speeds drift at every sample, all together more than one against another; so what is old is forgotten, and what the
  samples do not tell apart keeps its prior proportions.
* A sample outside of what is usual counts as much as one at the border of it (Huber), and one that is far outside
  does not count. What is usual is the running median of the errors.
* When the latest errors are all far outside, or all but one outside, and to the same side, they are no outliers: the
  worker has changed, or what was believed came from an outlier. Then the speeds of that kind of work are shifted by
  what the errors have in common. Would they be learned from one by one, whichever speed is known least would take all
  the blame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

CLIPPED_BEYOND = 1.5
"""Standard deviations."""
MEDIAN_OF_NORMAL = 0.6745
"""Half of all normal errors are within so many standard deviations."""
NOISE_AT_FIRST = 0.3
NOISE_MIN, NOISE_MAX = 0.02, 1.0
NOISE_STEP = 0.05
"""By how much a sample moves the noise."""
DRIFT_TOGETHER = 2e-4
"""Variance that each sample adds, of the logarithms of all speeds."""
DRIFT_APART = 1e-5
IGNORED_BEYOND = 3.0
CHANGED_AFTER = 5
"""Samples in a row that would have been ignored. Where one in ten is an outlier, that is one case of 100,000, ..."""
LATEST, SHIFTED_BEYOND = 7, 1.0
"""... and so is that all but one of so many errors have so many standard deviations in common."""
TYPICAL_STEP_MIN = 0.05
LOG_SPEED_MIN, LOG_SPEED_MAX = math.log(1e-15), math.log(1e4)
SECONDS_MIN, SECONDS_MAX = 1e-7, 1e6
"""What is measured outside of these was measured wrongly."""


class Prior:
    """What is believed before the first sample. Speeds of one group are of one kind of work, and vary together."""

    __slots__ = ("groups", "logs", "spread", "variance")

    def __init__(self, speeds: Sequence[float], groups: Sequence[int], *, together: float, apart: float) -> None:
        """``together`` and ``apart``: variances of the logarithms, of a group's speeds in common and of each alone."""
        self.logs: Floats = np.log(np.array(speeds))
        numbers = np.array(groups)
        self.groups: Floats = (numbers[:, None] == numbers[None, :]).astype(np.float64)
        self.spread: Floats = together * self.groups + apart * np.eye(len(speeds))
        self.variance = float(np.trace(self.spread))


class Speeds:
    """Of one worker, or of all that are like it. ``learn`` takes about 20 microseconds."""

    __slots__ = ("_drift", "_latest", "_logs", "_noise", "_prior", "_spread", "samples", "settled")

    def __init__(self, prior: Prior) -> None:
        self.samples = 0
        self.settled = 0
        """Samples since it last changed."""
        self._prior = prior
        self._logs = prior.logs
        self._spread = prior.spread
        self._noise = NOISE_AT_FIRST
        self._latest: dict[int, list[float]] = {}
        """Errors, by the kind of work that took most of the time."""
        self._drift = DRIFT_TOGETHER * prior.groups + DRIFT_APART * np.eye(len(prior.logs))

    def like(self, together: float, apart: float) -> Speeds:
        """Those of another worker, that is believed to be like this one but for so much variance."""
        made = Speeds(self._prior)
        made._logs, made._noise = self._logs, self._noise
        made._spread = self._spread + together * self._prior.groups + apart * np.eye(len(self._logs))
        return made

    def values(self) -> list[float]:
        """Seconds for one of each."""
        values: list[float] = np.exp(self._logs).tolist()
        return values

    def seconds(self, work: Sequence[float]) -> float:
        """What this is predicted to take."""
        return float(np.exp(self._logs) @ np.asarray(work))

    def learn(self, work: Sequence[float], seconds: float) -> bool:
        """So much work took so long. Nonsense is ignored, and answered with False."""
        speeds = np.exp(self._logs)
        amounts = np.array(work, dtype=np.float64)
        predicted = float(speeds @ amounts)
        if not (SECONDS_MIN <= seconds <= SECONDS_MAX and 0.0 < predicted < math.inf and min(work) >= 0.0):
            return False
        self.samples += 1
        self.settled += 1
        shares = speeds * amounts / predicted
        along = self._spread @ shares
        unsure = max(0.0, float(along @ shares))
        error = math.log(seconds / predicted)
        noise = self._noise * self._noise
        surprise = abs(error) / math.sqrt(unsure + noise)
        if surprise > IGNORED_BEYOND and self.samples > 1:
            self.settled = 0
        else:
            self._move(along, error, unsure + noise * max(1.0, surprise / CLIPPED_BEYOND))
        self._remember(shares, error, math.sqrt(unsure + noise))
        return True

    def _remember(self, shares: Floats, error: float, expected: float) -> None:
        latest = self._latest.setdefault(int(shares.argmax()), [])
        latest.append(error)
        beside = abs(error - sorted(latest)[len(latest) // 2])
        step = NOISE_STEP if beside > MEDIAN_OF_NORMAL * expected else -NOISE_STEP
        self._noise = min(max(self._noise * (1.0 + step), NOISE_MIN), NOISE_MAX)
        common = _common(latest, expected)
        if common:
            self._shift(shares, common)
            latest.clear()
        elif len(latest) == LATEST:
            del latest[0]

    def _shift(self, shares: Floats, error: float) -> None:
        """By so much, with what varies together with what the last sample mostly was."""
        self.settled = 0
        moved = self._prior.groups @ shares
        self._logs = np.clip(self._logs + error * moved, LOG_SPEED_MIN, LOG_SPEED_MAX)
        self._spread = self._spread + self._noise * self._noise * np.outer(moved, moved)

    def _move(self, along: Floats, error: float, total: float) -> None:
        logs = self._logs + along * (error / total)
        self._logs = np.minimum(np.maximum(logs, LOG_SPEED_MIN), LOG_SPEED_MAX)
        spread = self._spread - along[:, None] * (along / total)
        if spread.trace() < self._prior.variance:
            spread += self._drift
        self._spread = spread


def _common(errors: list[float], expected: float) -> float:
    """What they have in common, if that cannot be chance; else 0."""
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


class Typical:
    """The running median of a duration: half of what comes is longer. Each sample costs next to nothing."""

    __slots__ = ("_seconds", "samples")

    def __init__(self, at_first: float) -> None:
        self.samples = 0
        self._seconds = at_first

    @property
    def seconds(self) -> float:
        """As far as is known."""
        return self._seconds

    def like(self) -> Typical:
        """Another that begins where this one is."""
        return Typical(self._seconds)

    def learn(self, seconds: float) -> None:
        """Nearer to it, at first by a lot."""
        if not SECONDS_MIN <= seconds <= SECONDS_MAX:
            return
        factor = 1.0 + max(1.0 / (1.0 + self.samples), TYPICAL_STEP_MIN)
        self.samples += 1
        if seconds > self._seconds:
            self._seconds = min(self._seconds * factor, seconds)
        else:
            self._seconds = max(self._seconds / factor, seconds)
