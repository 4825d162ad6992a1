"""Intervals of measures and of paired differences, from runs with several seeds.

Requests of one run are not independent: a queue makes all that arrive in the same minutes late. So a run is cut into
windows of time, and whole windows are drawn (block bootstrap: Künsch, Annals of Statistics 17, 1989; here with blocks
that do not overlap). Each resample draws seeds, and then windows of each seed, with replacement. Runs of two policies
with the same seed have the same requests, so each resample uses the same seeds and windows for both, and their
difference is paired. Intervals are percentiles of the resamples.

A window must be longer than what makes neighbours alike: ``WINDOWS`` windows of an hour are several minutes each. In
overload, where a queue grows over the whole run, windows differ systematically, and the intervals are too wide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from bench.study.samples import Samples
from replay.results import Slo

WINDOWS = 12
RESAMPLES = 1000
CONFIDENCE = 0.95
UNPAIRED = "runs to compare must have the same requests, seed by seed"


@dataclass(frozen=True, slots=True)
class Interval:
    """A measure with its confidence interval."""

    value: float
    low: float
    high: float

    @property
    def above_zero(self) -> bool:
        """Whether a difference is positive with confidence."""
        return self.low > 0.0

    @property
    def below_zero(self) -> bool:
        """Whether a difference is negative with confidence."""
        return self.high < 0.0


class Pool:
    """Runs of one policy, a seed each, with a row of weights for each resample: how often it counts a request."""

    def __init__(self, runs: Sequence[Samples], slo: Slo) -> None:
        self.runs = runs
        self.slo = slo
        self.windows = np.concatenate([WINDOWS * seed + _windows(run) for seed, run in enumerate(runs)])

    def column(self, of: Callable[[Samples], np.ndarray]) -> np.ndarray:
        """A value of all requests of all runs."""
        return np.concatenate([np.asarray(of(run), dtype=float) for run in self.runs])

    def share(self, of: Callable[[Samples], np.ndarray], weights: np.ndarray, *, by_tokens: bool = False) -> np.ndarray:
        """For each row of window weights, the share of requests (or of all tokens) for which ``of`` is true."""
        each = self.column(_tokens) if by_tokens else np.ones(len(self.windows))
        count = weights.shape[1]
        hits = np.bincount(self.windows, each * self.column(of), minlength=count)
        total = np.bincount(self.windows, each, minlength=count)
        return (weights @ hits) / np.maximum(weights @ total, 1e-12)

    def percentile(self, of: Callable[[Samples], np.ndarray], percent: float, weights: np.ndarray) -> np.ndarray:
        """For each row of window weights, a percentile by nearest rank."""
        values = self.column(of)
        order = np.argsort(values, kind="stable")
        values, windows = values[order], self.windows[order]
        found = np.empty(len(weights))
        for row, weight in enumerate(weights):
            seen = np.cumsum(weight[windows])
            found[row] = values[min(len(values) - 1, int(np.searchsorted(seen, seen[-1] * percent / 100 - 1e-9)))]
        return found


Measure = Callable[[Pool, np.ndarray], np.ndarray]


def _ttft(run: Samples) -> np.ndarray:
    return run.ttft_s


def _tokens(run: Samples) -> np.ndarray:
    return run.prompt_tokens + run.output_tokens


def _good_share(pool: Pool, weights: np.ndarray, *, by_tokens: bool = False) -> np.ndarray:
    return pool.share(lambda run: run.good(pool.slo.ttft_s, pool.slo.itl_s), weights, by_tokens=by_tokens)


def _ttft_percentile(pool: Pool, weights: np.ndarray, *, percent: float) -> np.ndarray:
    return pool.percentile(_ttft, percent, weights)


MEASURES: dict[str, Measure] = {
    "good_share": _good_share,
    "good_tokens_share": partial(_good_share, by_tokens=True),
    "ttft_p50": partial(_ttft_percentile, percent=50),
    "ttft_p95": partial(_ttft_percentile, percent=95),
    "ttft_p99": partial(_ttft_percentile, percent=99),
}


def measured(pool: Pool, names: Sequence[str] = tuple(MEASURES)) -> dict[str, Interval]:
    """Each measure of one policy."""
    weights = drawn(len(pool.runs))
    return {name: _interval(MEASURES[name](pool, weights)) for name in names}


def compared(one: Pool, other: Pool, names: Sequence[str] = tuple(MEASURES)) -> dict[str, Interval]:
    """``one`` less ``other``, relative to ``other``. Raises ValueError for runs of different requests.

    Where the other's measure is infinite, ``one`` is below it by all of it (-1), or equal (0).
    """
    if len(one.runs) != len(other.runs) or not all(map(_alike, one.runs, other.runs)):
        raise ValueError(UNPAIRED)
    weights = drawn(len(one.runs))
    return {name: _interval(_relative(MEASURES[name](one, weights), MEASURES[name](other, weights))) for name in names}


def drawn(seeds: int, resamples: int = RESAMPLES) -> np.ndarray:
    """Weights of all windows of all seeds: in the first row as they are, then in each resample."""
    rng = np.random.default_rng(seeds)
    weights = np.ones((1 + resamples, seeds * WINDOWS))
    for row in range(1, 1 + resamples):
        chosen = rng.integers(0, seeds, seeds)[:, None] * WINDOWS + rng.integers(0, WINDOWS, (seeds, WINDOWS))
        weights[row] = np.bincount(chosen.ravel(), minlength=seeds * WINDOWS)
    return weights


def _windows(run: Samples) -> np.ndarray:
    """Of equally many successive requests: a window of equal time might have none, and so no percentile."""
    ranks = np.argsort(np.argsort(run.due_s, kind="stable"), kind="stable")
    return ranks * WINDOWS // max(1, len(ranks))


def _alike(one: Samples, other: Samples) -> bool:
    return np.array_equal(one.due_s, other.due_s) and np.array_equal(one.prompt_tokens, other.prompt_tokens)


def _relative(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        found = (one - other) / other
    found = np.where(np.isinf(other), np.where(np.isinf(one), 0.0, -1.0), found)
    return np.where((one == 0.0) & (other == 0.0), 0.0, found)


def _interval(values: np.ndarray) -> Interval:
    outside = (1 - CONFIDENCE) / 2 * 100
    low, high = np.percentile(values[1:], (outside, 100 - outside), method="nearest")
    return Interval(float(values[0]), float(low), float(high))
