"""How probably a prediction keeps its target: how many of the newest requests with such a prediction would have.

For the first token, what is kept is measured over predicted: what a prompt takes is near its prediction, and errors
grow with it. For the time between tokens it is what was measured: that depends on the prompts that are sent to the
worker later, and on the gaps that admission leaves between them, which hold it just below the target whatever was
predicted (DECISIONS 72).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from typing import Final

from shared.bounded import Bounded

UNKNOWN: Final = -1.0
SAMPLES_MIN: Final = 50
"""The probability is unknown before so many requests of the model have ended."""
NEWEST_MAX: Final = 256
"""Requests that count of each class of predictions."""
ALL_MAX: Final = 1024
"""Requests that count of all classes together."""
WEIGHT_OF_ALL: Final = 16.0
"""All classes together weigh as much as so many requests of the prediction's own class, which may have none."""
PREDICTED_MIN_S: Final = 1e-3
PREDICTED_MAX_S: Final = 1e3
"""Bounds of predictions, and so of the number of classes."""
MODELS_MAX: Final = 64
"""Models of which outcomes are kept."""


class Newest:
    """The newest numbers, in order of size."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._by_age: deque[float] = deque()
        self._by_size: list[float] = []

    def __len__(self) -> int:
        return len(self._by_size)

    def add(self, number: float) -> None:
        self._by_age.append(number)
        insort(self._by_size, number)
        if len(self._by_size) > self._count_max:
            del self._by_size[bisect_left(self._by_size, self._by_age.popleft())]

    def up_to(self, limit: float) -> int:
        """How many of them are ``limit`` or less."""
        return bisect_right(self._by_size, limit)


class Outcomes:
    """What became of one model's predictions of one kind, by classes of predictions."""

    def __init__(self, *, are_ratios: bool) -> None:
        """``are_ratios``: whether measured over predicted is kept, or measured alone."""
        self._are_ratios = are_ratios
        self._classes: dict[int, Newest] = {}
        self._all = Newest(ALL_MAX)

    def learn(self, predicted_s: float, measured_s: float) -> None:
        """A request has ended."""
        if not 0.0 <= measured_s < math.inf:
            return
        predicted_s = _bounded(predicted_s)
        number = measured_s / predicted_s if self._are_ratios else measured_s
        key = math.frexp(predicted_s)[1]
        newest = self._classes.get(key)
        if newest is None:
            newest = self._classes[key] = Newest(NEWEST_MAX)
        newest.add(number)
        self._all.add(number)

    def probability(self, predicted_s: float, limit_s: float) -> float:
        """That what is measured will be ``limit_s`` at most."""
        if len(self._all) < SAMPLES_MIN:
            return UNKNOWN
        if limit_s <= 0.0:
            return 0.0
        predicted_s = _bounded(predicted_s)
        limit = limit_s / predicted_s if self._are_ratios else limit_s
        of_all = (self._all.up_to(limit) + 0.5) / (len(self._all) + 1.0)
        newest = self._classes.get(math.frexp(predicted_s)[1])
        if newest is None:
            return of_all
        return (newest.up_to(limit) + WEIGHT_OF_ALL * of_all) / (len(newest) + WEIGHT_OF_ALL)


class ModelOdds:
    """The outcomes of one model's requests."""

    def __init__(self) -> None:
        self.ttft = Outcomes(are_ratios=True)
        """The first token's time from the placement on."""
        self.itl = Outcomes(are_ratios=False)


class Odds:
    """The outcomes of all models; beyond ``MODELS_MAX``, that which was seen first is forgotten."""

    def __init__(self) -> None:
        self._models: Bounded[str, ModelOdds] = Bounded(MODELS_MAX)

    def of(self, model: str) -> ModelOdds:
        """The outcomes of the model, which may have none yet."""
        odds = self._models.get(model)
        if odds is None:
            odds = self._models[model] = ModelOdds()
        return odds


def _bounded(predicted_s: float) -> float:
    """Within the bounds of predictions, also what is not a number."""
    if not predicted_s < PREDICTED_MAX_S:
        return PREDICTED_MAX_S
    return max(predicted_s, PREDICTED_MIN_S)
