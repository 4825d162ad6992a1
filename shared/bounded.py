"""A dictionary with a maximum: beyond it, the oldest entry is dropped."""

from __future__ import annotations

from collections import UserDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(UserDict[K, V]):
    """Keeps the ``count_max`` entries that were added last. A new value for a key does not make its entry younger: pop
    the old one first.
    """

    def __init__(self, count_max: int) -> None:
        super().__init__()
        self._count_max = count_max

    def __setitem__(self, key: K, value: V) -> None:
        self.data[key] = value
        if len(self.data) > self._count_max:
            del self.data[next(iter(self.data))]
