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
from functools import cache, cached_property

import numpy as np

from bench.study.results import Slo
from bench.study.samples import Samples

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


MEASURES = ("good_share", "good_tokens_share", "ttft_p50", "ttft_p95", "ttft_p99")
PERCENTILES = {"ttft_p50": 50, "ttft_p95": 95, "ttft_p99": 99}


class Pool:
    """Runs of one policy, a seed each."""

    def __init__(self, runs: Sequence[Samples], slo: Slo) -> None:
        self.runs = runs
        self._slo = slo
        self._windows = np.concatenate([WINDOWS * seed + _windows(run) for seed, run in enumerate(runs)])

    @cached_property
    def values(self) -> dict[str, np.ndarray]:
        """Each measure: as it was, then in each resample."""
        weights = drawn(len(self.runs))
        found = {
            "good_share": self._good_share(weights, np.ones(len(self._windows))),
            "good_tokens_share": self._good_share(
                weights, self._column(lambda run: run.prompt_tokens + run.output_tokens)
            ),
        }
        percentiles = self._percentiles(weights, self._column(lambda run: run.ttft_s), list(PERCENTILES.values()))
        return {**found, **dict(zip(PERCENTILES, percentiles.T, strict=True))}

    def _column(self, of: Callable[[Samples], np.ndarray]) -> np.ndarray:
        return np.concatenate([np.asarray(of(run), dtype=float) for run in self.runs])

    def _good_share(self, weights: np.ndarray, each: np.ndarray) -> np.ndarray:
        """``each``: what a request counts."""
        count = weights.shape[1]
        good = self._column(lambda run: run.good(self._slo.ttft_s, self._slo.itl_s))
        total = np.bincount(self._windows, each, minlength=count)
        hits = np.bincount(self._windows, each * good, minlength=count)
        return (weights @ hits) / np.maximum(weights @ total, 1e-12)

    def _percentiles(self, weights: np.ndarray, values: np.ndarray, percents: Sequence[float]) -> np.ndarray:
        """By nearest rank; a row for each row of weights."""
        order = np.argsort(values, kind="stable")
        values, windows = values[order], self._windows[order]
        shares = np.array(percents) / 100
        found = np.empty((len(weights), len(percents)))
        for row, weight in enumerate(weights):
            seen = np.cumsum(weight[windows])
            found[row] = values[np.minimum(len(values) - 1, np.searchsorted(seen, seen[-1] * shares - 1e-9))]
        return found


def measured(pool: Pool, names: Sequence[str] = MEASURES) -> dict[str, Interval]:
    """Each measure of one policy."""
    return {name: _interval(pool.values[name]) for name in names}


def compared(one: Pool, other: Pool, names: Sequence[str] = MEASURES) -> dict[str, Interval]:
    """``one`` less ``other``, relative to ``other``. Raises ValueError for runs of different requests.

    Where the other's measure is infinite, ``one`` is below it by all of it (-1), or equal (0).
    """
    if len(one.runs) != len(other.runs) or not all(map(_alike, one.runs, other.runs)):
        raise ValueError(UNPAIRED)
    return {name: _interval(_relative(one.values[name], other.values[name])) for name in names}


@cache
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
