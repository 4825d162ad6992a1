"""Random ids, of which many are made in one call of the kernel: one by one, each costs a system call."""

from __future__ import annotations

import os
from typing import Final

READ_AT_ONCE: Final = 256


class RandomIds:
    """``next`` returns so many random bytes as hexadecimal digits, as ``secrets.token_hex`` does."""

    def __init__(self, size: int) -> None:
        self._digits = 2 * size
        self._left: list[str] = []

    def next(self) -> str:
        if not self._left:
            text = os.urandom(READ_AT_ONCE * self._digits // 2).hex()
            self._left = [text[at : at + self._digits] for at in range(0, len(text), self._digits)]
        return self._left.pop()
