"""How a fleet's workers are split into roles."""

from __future__ import annotations

import re

import msgspec

from shared.contracts.workers import Role

LETTERS = {"P": "prefill", "D": "decode", "B": "both"}


class SplitError(ValueError):
    """The text is no split that can serve."""


class Split(msgspec.Struct, frozen=True, order=True):
    """Workers of each role. Those of role both compute prompts and decode."""

    prefill: int = 0
    decode: int = 0
    both: int = 0

    @property
    def workers(self) -> int:
        """All of them."""
        return self.prefill + self.decode + self.both

    @property
    def counts(self) -> tuple[int, int, int]:
        """In the order of the fields."""
        return self.prefill, self.decode, self.both

    def times(self, cost: Split) -> int:
        """What all take, where a worker of each role takes as much as ``cost`` says."""
        return sum(count * each for count, each in zip(self.counts, cost.counts, strict=True))

    @property
    def can_serve(self) -> bool:
        """Whether prompts can be computed and answers generated."""
        return min(self.counts) >= 0 and (self.both > 0 or (self.prefill > 0 and self.decode > 0))

    def __str__(self) -> str:
        return " + ".join(f"{getattr(self, role)} {role}" for role in LETTERS.values() if getattr(self, role))

    @property
    def short(self) -> str:
        """As ``split_of`` reads it."""
        return "+".join(f"{getattr(self, role)}{letter}" for letter, role in LETTERS.items() if getattr(self, role))

    def roles(self) -> list[Role]:
        """Role of each worker."""
        return [Role.BOTH] * self.both + [Role.PREFILL] * self.prefill + [Role.DECODE] * self.decode


def split_of(text: str) -> Split:
    """Parse ``3P+1D``, ``4B`` or ``2P+1D+1B``. Raises SplitError."""
    counts = dict.fromkeys(LETTERS.values(), 0)
    for part in text.upper().split("+"):
        match = re.fullmatch(r"\s*(\d{1,4})\s*([PDB])\s*", part)
        if match is None:
            raise SplitError(f"{text!r} is no split; write 3P+1D, 4B or 2P+1D+1B (prefill, decode, both)")
        counts[LETTERS[match[2]]] += int(match[1])
    split = Split(**counts)
    if not split.can_serve:
        raise SplitError(f"{text!r} cannot serve: it needs prefill and decode workers, or workers for both")
    return split
