"""The numbers that placement computes with, in columns, of which C computes several rows in one instruction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from msgspec.structs import astuple

from services.router.state.worker_speed import WorkerSpeed

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ROWS_AT_FIRST: Final = 56
"""Rows of a new table. This number and those that it grows to are 8 less than a power of two: columns that begin at
multiples of 4 KB would compete for the same few lines of the processor's cache."""

LEGS_MAX: Final = 0
LAST_CHOSEN: Final = 1
"""The number of the placement that last chose the worker."""
BLOCK_SIZE: Final = 2
STEP_TOKENS: Final = 3
"""The most prompt tokens that the worker's engine computes in one step."""
ANSWERS: Final = 4
"""1 if the worker serves decode legs, else 0: prompts on a prefill worker delay no decodes."""
HANDED_OVER_MIN: Final = 5
"""The fewest prompt tokens, beyond those that the worker has, of which another one can hand over some KV."""
DROPPED_TOKENS: Final = 6
"""Tokens at the end of a prompt's cached prefix that the worker's engine does not use."""
HEARD_AT: Final = 7
"""The first of ten columns that change with each report: see ``set_report``."""
PROMPTS_PER_S: Final = 8
"""Prompt tokens that the worker lately computed per second."""
EVICTED_BLOCKS: Final = 9
"""Blocks that the worker's cache lately evicted."""
RESTORED_BLOCKS: Final = 10
"""Blocks that the worker lately stored although some worker had had them: all copies had been evicted."""
LEGS: Final = 11
"""The first of six columns that change with each leg: see ``set_load``."""
DECODING: Final = 12
"""Requests in the batch of the worker's engine, or about to be."""
WAITING_TOKENS: Final = 13
"""Prompt tokens that the worker has accepted and not computed yet."""
CONTEXT_TOKENS: Final = 14
"""Tokens in the KV cache that running requests use."""
FREE_TOKENS: Final = 15
"""Free tokens of the KV cache."""
SENT_TOKENS: Final = 16
"""The part of ``WAITING_TOKENS`` that was sent after the worker's last report."""
SPEED: Final = 17
"""The first of the columns that hold the fields of ``WorkerSpeed``, in their order."""
PREFILL_STEP_S: Final = SPEED
PREFILL_TOKEN_S: Final = SPEED + 1
PREFILL_PAIR_S: Final = SPEED + 2
DECODE_STEP_S: Final = SPEED + 3
DECODE_REQUEST_S: Final = SPEED + 4
DECODE_CONTEXT_TOKEN_S: Final = SPEED + 5
TRANSFER_BASE_S: Final = SPEED + 6
TRANSFER_TOKEN_S: Final = SPEED + 7
PAIRS_PER_TOKEN: Final = SPEED + 8
TRANSIT_S: Final = SPEED + 9
PROMPTS_MEASURED: Final = SPEED + 10
DIVISORS: Final = [BLOCK_SIZE, STEP_TOKENS]
"""Columns that are never 0, not even in unused rows: C evaluates formulas for all rows at once."""
NUMBERS: Final = SPEED + len(WorkerSpeed.__struct_fields__)

READY: Final = 0
"""See ``WorkerView.ready``."""
PREFILLS: Final = 1
DECODES: Final = 2
EXCHANGES_KV: Final = 3
"""The worker's engine can be asked for KV by content."""
ATTACHED: Final = 4
"""The worker's server is outside of Baton."""
SERVES: Final = 5
"""The worker takes legs; a store only keeps copies of KV."""
FLAGS: Final = 6


class Columns(Protocol):
    """Reads and writes single numbers of the table."""

    def read(self, row: int, /) -> list[float]:
        """All numbers of a row."""

    def write(self, row: int, first: int, /, *values: float) -> None:
        """Write these numbers of a row, from ``first`` on."""


class PythonColumns:
    """The form without a compiler, which takes ten times as long."""

    def __init__(self, numbers: Floats) -> None:
        self._numbers = numbers

    def read(self, row: int, /) -> list[float]:
        values: list[float] = self._numbers[:, row].tolist()
        return values

    def write(self, row: int, first: int, /, *values: float) -> None:
        self._numbers[first : first + len(values), row] = values


make_columns: Callable[[Floats], Columns] = PythonColumns
try:
    from services.router.native._placement import Columns as NativeColumns
except ImportError:
    pass
else:
    make_columns = NativeColumns


class FleetTable:
    """``numbers[what, row]``, ``flags[what, row]`` and ``groups[row]``: rows of equal group may exchange KV. Rows are
    reused; ``count`` is the highest that was ever in use, plus one.
    """

    def __init__(self) -> None:
        self.numbers: Floats = np.zeros((NUMBERS, ROWS_AT_FIRST))
        self.numbers[DIVISORS] = 1.0
        self.flags: Bools = np.zeros((FLAGS, ROWS_AT_FIRST), dtype=np.bool_)
        self.groups: Ints = np.full(ROWS_AT_FIRST, -1, dtype=np.int64)
        self.count = 0
        self.moves = 0
        """Counts every time that a row was taken or given back."""
        self._free: list[int] = []
        self._columns = make_columns(self.numbers)

    def take(self) -> int:
        """A row of zeros."""
        self.moves += 1
        if self._free:
            return self._free.pop()
        if self.count == len(self.groups):
            self._grow()
        self.count += 1
        return self.count - 1

    def give_back(self, row: int) -> None:
        """The row is free for another worker."""
        self.numbers[:, row] = 0.0
        self.numbers[DIVISORS, row] = 1.0
        self.flags[:, row] = False
        self.groups[row] = -1
        self.moves += 1
        self._free.append(row)

    def of(self, row: int) -> list[float]:
        """All numbers of a row."""
        return self._columns.read(row)

    def set_load(  # as many as a leg changes
        self, row: int, legs: float, decoding: float, waiting: float, context: float, free: float, sent: float
    ) -> None:
        """Write the numbers from ``LEGS`` on."""
        self._columns.write(row, LEGS, legs, decoding, waiting, context, free, sent)

    def set_report(  # noqa: PLR0913, PLR0917  # as many as a report changes
        self,
        row: int,
        heard_at: float,
        prompts_per_s: float,
        evicted: float,
        restored: float,
        legs: float,
        decoding: float,
        waiting: float,
        context: float,
        free: float,
        sent: float,
    ) -> None:
        """Write the numbers from ``HEARD_AT`` on."""
        self._columns.write(
            row, HEARD_AT, heard_at, prompts_per_s, evicted, restored, legs, decoding, waiting, context, free, sent
        )

    def set(self, row: int, what: int, value: float) -> None:
        """Write one number."""
        self._columns.write(row, what, value)

    def prompt_step_s(self, row: int) -> float:
        """What a full step of prompt tokens adds to a decode step of this worker; 0 where it serves no decode legs, or
        was not measured yet.
        """
        n = self._columns.read(row)
        each_s = n[PREFILL_TOKEN_S] + n[PREFILL_PAIR_S] * n[PAIRS_PER_TOKEN]
        return n[PROMPTS_MEASURED] * n[ANSWERS] * (n[PREFILL_STEP_S] + n[STEP_TOKENS] * each_s)

    def set_speed(self, row: int, speed: WorkerSpeed) -> None:
        """Write how fast that worker is."""
        values: tuple[Any, ...] = astuple(speed)
        self.numbers[SPEED:, row] = values

    def _grow(self) -> None:
        rows, before = 2 * len(self.groups) + 8, len(self.groups)
        numbers: Floats = np.zeros((NUMBERS, rows))
        numbers[:, :before] = self.numbers
        numbers[DIVISORS, before:] = 1.0
        self.numbers = numbers
        for name, empty in (("flags", False), ("groups", -1)):
            old = getattr(self, name)
            new = np.full((*old.shape[:-1], rows), empty, dtype=old.dtype)
            new[..., : old.shape[-1]] = old
            setattr(self, name, new)
        self._columns = make_columns(numbers)
