"""How fast the engines of one fingerprint are, learned from their own accounts of their steps.

Their equations are solved by least squares of relative errors. What the samples do not tell apart keeps the usual
proportions at the measured scale.

Samples are forgotten only for others of their kind: by how large the batches were. What full batches took is known on
when the fleet has grown and batches are small; otherwise it would shrink on a guess, grow again, and so on.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from shared.engine_speed import USUAL, Steps, StepTimeModel

Floats = npt.NDArray[np.float64]

PROPORTIONS: Floats = np.array(USUAL)
"""Of the usual speeds nothing else is believed."""
PREFILL, DECODE = slice(0, 3), slice(3, 6)
SAMPLE_S_MIN = 0.05
"""Less of steps says more of the clock than of the engine; it counts when there is more."""
KEPT_PER_SAMPLE = 0.95
"""So much of what was learned from samples of one kind counts on: the last 20 do."""
BELIEF = 0.02
"""How many samples the usual proportions weigh, ..."""
STEPS = 4
"""... each time that they are corrected: proportions that samples tell apart end where those want them."""
SHARE_MIN = 0.01
"""No speed is less than this part of what the usual proportions say: noise must not make work free."""
MEASURED_MIN = 0.5
"""Samples' worth of a phase before its speed counts as known."""
SINGULAR = 1e-9


class SpeedLearner:
    """Of all engines of a fingerprint together: they run the same model on the same kind of machine."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], Equations] = {}
        self._solved: StepTimeModel | None = None

    @property
    def knows(self) -> bool:
        """Whether any engine has been measured."""
        return any(kind.seen.sum() >= MEASURED_MIN for kind in self._kinds.values())

    def worked(self, done: Steps) -> None:
        """An engine did this in that time. Nonsense is ignored."""
        parts = np.array(done.work(), dtype=np.float64) * PROPORTIONS
        whole = float(parts.sum())
        if not (SAMPLE_S_MIN <= done.seconds < math.inf and 0.0 < whole < math.inf and parts.min() >= 0.0):
            return
        self._kinds.setdefault(_kind(done), Equations()).add(parts / done.seconds)
        self._solved = None

    def speeds(self) -> StepTimeModel | None:
        """As far as is known; None before anything was measured. A phase that was not has the scale of the other."""
        if self._solved is None and self._kinds:
            self._solved = StepTimeModel(*_solve(sum(self._kinds.values(), Equations())).tolist())
        return self._solved


class Equations:
    """Some samples, as the sums that least squares need."""

    def __init__(self) -> None:
        self.squares: Floats = np.zeros((6, 6))
        self.products: Floats = np.zeros(6)
        self.seen: Floats = np.zeros(2)
        """Samples' worth of prefill and of decode."""

    def add(self, row: Floats) -> None:
        """One more; the earlier ones count less for it."""
        self.squares = self.squares * KEPT_PER_SAMPLE + np.outer(row, row)
        self.products = self.products * KEPT_PER_SAMPLE + row
        shares = np.array([row[PREFILL].sum(), row[DECODE].sum()]) / row.sum()
        self.seen = self.seen * KEPT_PER_SAMPLE + shares

    def __add__(self, other: Equations) -> Equations:
        both = Equations()
        both.squares, both.products = self.squares + other.squares, self.products + other.products
        both.seen = self.seen + other.seen
        return both


def _kind(done: Steps) -> tuple[int, int]:
    """Prompt tokens in a step and completions in a step, by powers of two."""
    tokens = done.prefill_tokens / done.prefill_steps if done.prefill_steps else 0.0
    completions = done.decode_requests / done.decode_steps if done.decode_steps else 0.0
    return int(tokens).bit_length(), int(completions).bit_length()


def _solve(told: Equations) -> Floats:
    scale = _scales(told)
    shares: Floats = np.ones(6)
    for _step in range(STEPS):
        each = scale * shares
        squares = told.squares * np.outer(each, each)
        factors = np.linalg.solve(squares + BELIEF * np.eye(6), told.products * each + BELIEF)
        shares = np.maximum(shares * np.maximum(factors, SHARE_MIN), SHARE_MIN)
    return shares * scale * PROPORTIONS


def _scales(told: Equations) -> Floats:
    """By what factor prefill and decode are slower than usual, with the usual proportions within each."""
    sums = np.zeros((2, 6))
    sums[0, PREFILL] = sums[1, DECODE] = 1.0
    squares, products = sums @ told.squares @ sums.T, sums @ told.products
    whole = products.sum() / squares.sum()
    apart = np.linalg.solve(squares + SINGULAR * squares.trace() * np.eye(2), products)
    is_known = (told.seen >= MEASURED_MIN) & (apart > SHARE_MIN * whole)
    scales: Floats = sums.T @ np.where(is_known, apart, whole)
    return scales
