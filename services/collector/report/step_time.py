"""The law of one model's engines, as far as a verdict asks for it: without pairs and context.

Nothing in it is negative. Where batches have hardly varied nobody can tell what a step costs from what each completion
in it costs; then there are two laws, the extremes, and whoever asks has to live with both.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import numpy.typing as npt

from shared.engine_speed import Steps, StepTimeModel

PARTS = len(StepTimeModel._fields)
DECODE_STEPS, DECODE_REQUESTS = 3, 4
FITTED = (0, 1, DECODE_STEPS, DECODE_REQUESTS)
"""The others stay 0."""
MEMORY_S = 600.0
"""Equations are forgotten by and by."""
ROWS_MIN = 20
UNLIKE_MIN = 0.005
"""Of the completions in steps, how much must not follow from the number of steps (and all else) to tell them apart."""
SECONDS_MIN = 1e-3
"""A shorter equation weighs no more than this one: its parts are rounded."""

Vector = npt.NDArray[np.float64]


class StepLaw:
    """The law of one model's engines."""

    def __init__(self) -> None:
        self.rows = 0
        self._products: Vector = np.zeros((PARTS, PARTS))
        self._seconds: Vector = np.zeros(PARTS)
        self._at = 0.0

    def add(self, done: Steps, now: float) -> None:
        """One equation more: some engine did this."""
        kept = math.exp(-max(0.0, now - self._at) / MEMORY_S)
        self._at = max(self._at, now)
        weight = 1.0 / max(done.seconds, SECONDS_MIN)
        work = np.array(done.work(), dtype=np.float64)
        self._products = kept * self._products + weight * np.outer(work, work)
        self._seconds = kept * self._seconds + weight * done.seconds * work
        self.rows += 1

    def laws(self) -> tuple[StepTimeModel, ...]:
        """None while too little is known, one, or two where what was seen fits both."""
        if self.rows < ROWS_MIN or not self._products[DECODE_STEPS, DECODE_STEPS]:
            return ()
        everything = set(FITTED)
        if self._tells_apart():
            return (self._fit(everything),)
        return self._fit(everything - {DECODE_REQUESTS}), self._fit(everything - {DECODE_STEPS})

    def _tells_apart(self) -> bool:
        others = [one for one in FITTED if one != DECODE_REQUESTS and self._products[one, one] > 0]
        own = self._products[DECODE_REQUESTS, DECODE_REQUESTS]
        shared = self._products[others, DECODE_REQUESTS]
        explained = shared @ np.linalg.pinv(self._products[np.ix_(others, others)]) @ shared
        return bool(own - explained > UNLIKE_MIN * own)

    def _fit(self, features: set[int]) -> StepTimeModel:
        """Least squares without negative parts: of the few ways to leave some out, the best that has none."""
        seen = [one for one in sorted(features) if self._products[one, one] > 0]
        best, best_gain = np.zeros(PARTS), 0.0
        for count in range(1, len(seen) + 1):
            for chosen in combinations(seen, count):
                rows = list(chosen)
                parts = np.linalg.pinv(self._products[np.ix_(rows, rows)]) @ self._seconds[rows]
                gain = float(parts @ self._seconds[rows])
                if parts.min() >= 0 and gain > best_gain:
                    best, best_gain = np.zeros(PARTS), gain
                    best[rows] = parts
        return StepTimeModel(*best.tolist())
