"""How long an engine's steps take, by what they compute: learned from load reports, as equations of one law.

    seconds = prefill_step_s * steps with prompt tokens + prefill_token_s * prompt tokens
            + decode_step_s * steps with completions + decode_request_s * completions in these steps

Nothing in it is negative. Where batches have hardly varied nobody can tell what a step costs from what each completion
in it costs; then there are two laws, the extremes, and whoever asks has to live with both.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shared.contracts.load import StepTotals

FEATURES = ("prefill_steps", "prefill_tokens", "decode_steps", "decode_requests")
DECODE_STEPS, DECODE_REQUESTS = 2, 3
MEMORY_S = 600.0
"""Equations are forgotten by and by."""
ROWS_MIN = 20
UNLIKE_MIN = 0.005
"""Of the completions in steps, how much must not follow from the number of steps (and all else) to tell them apart."""
SECONDS_MIN = 1e-3
"""A shorter equation weighs no more than this one: its parts are rounded."""

Vector = npt.NDArray[np.float64]


class Law(NamedTuple):
    """See the module."""

    prefill_step_s: float
    prefill_token_s: float
    decode_step_s: float
    decode_request_s: float


class StepLaw:
    """The law of one model's engines."""

    def __init__(self) -> None:
        self.rows = 0
        self._products: Vector = np.zeros((len(FEATURES), len(FEATURES)))
        self._seconds: Vector = np.zeros(len(FEATURES))
        self._at = 0.0

    def add(self, work: Vector, seconds: float, now: float) -> None:
        """One equation more: some engine did this work in so many seconds of steps."""
        kept = math.exp(-max(0.0, now - self._at) / MEMORY_S)
        self._at = max(self._at, now)
        weight = 1.0 / max(seconds, SECONDS_MIN)
        self._products = kept * self._products + weight * np.outer(work, work)
        self._seconds = kept * self._seconds + weight * seconds * work
        self.rows += 1

    def laws(self) -> tuple[Law, ...]:
        """None while too little is known, one, or two where what was seen fits both."""
        if self.rows < ROWS_MIN or not self._products[DECODE_STEPS, DECODE_STEPS]:
            return ()
        everything = set(range(len(FEATURES)))
        if self._tells_apart():
            return (self._fit(everything),)
        return self._fit(everything - {DECODE_REQUESTS}), self._fit(everything - {DECODE_STEPS})

    def _tells_apart(self) -> bool:
        others = [one for one in range(len(FEATURES)) if one != DECODE_REQUESTS and self._products[one, one] > 0]
        own = self._products[DECODE_REQUESTS, DECODE_REQUESTS]
        shared = self._products[others, DECODE_REQUESTS]
        explained = shared @ np.linalg.pinv(self._products[np.ix_(others, others)]) @ shared
        return bool(own - explained > UNLIKE_MIN * own)

    def _fit(self, features: set[int]) -> Law:
        """Least squares without negative parts: of the few ways to leave some out, the best that has none."""
        seen = [one for one in sorted(features) if self._products[one, one] > 0]
        best, best_gain = np.zeros(len(FEATURES)), 0.0
        for count in range(1, len(seen) + 1):
            for chosen in combinations(seen, count):
                rows = list(chosen)
                parts = np.linalg.pinv(self._products[np.ix_(rows, rows)]) @ self._seconds[rows]
                gain = float(parts @ self._seconds[rows])
                if parts.min() >= 0 and gain > best_gain:
                    best, best_gain = np.zeros(len(FEATURES)), gain
                    best[rows] = parts
        return Law(*best.tolist())


def work_between(earlier: StepTotals, later: StepTotals) -> tuple[Vector, float]:
    """What was computed from one to the other, in the order of ``FEATURES``, and the seconds of it."""
    values: list[Any] = [getattr(later, name) - getattr(earlier, name) for name in FEATURES]
    return np.array(values, dtype=np.float64), later.seconds - earlier.seconds
