"""State of each block of a fetch. Indices count from the start of the prompt."""

from __future__ import annotations

MISSING, GRANTED, ARRIVED = 0, 1, 2
"""Not leased; leased, perhaps being read; arrived."""


class BlockProgress:
    """A run of blocks, one byte each: every event searches it, and a long prompt has thousands of blocks."""

    def __init__(self, start: int, goal: int) -> None:
        self.start = start
        self._states = bytearray(max(0, goal - start))

    def __len__(self) -> int:
        return len(self._states)

    @property
    def end(self) -> int:
        """Index after the last block."""
        return self.start + len(self._states)

    @property
    def arrived(self) -> int:
        """Blocks of the longest prefix that arrived."""
        return len(self._states) - len(self._states.lstrip(bytes([ARRIVED])))

    @property
    def promised(self) -> int:
        """Blocks of the longest prefix that arrived or is leased."""
        return self.next_missing(self.start) - self.start

    def cut(self, count: int) -> None:
        """Reduce the run to its first ``count`` blocks."""
        del self._states[count:]

    def mark(self, first: int, count: int, state: int) -> None:
        """Set the state of ``count`` blocks from ``first`` on; blocks outside the run are ignored."""
        begin, end = max(0, first - self.start), min(len(self._states), first - self.start + count)
        if begin < end:
            self._states[begin:end] = bytes([state]) * (end - begin)

    def next_missing(self, index: int) -> int:
        """The first missing block from ``index`` on; ``end`` if there is none."""
        found = self._states.find(MISSING, index - self.start)
        return self.end if found < 0 else self.start + found

    def missing_until(self, index: int, end: int) -> int:
        """End of the run of missing blocks that begins at ``index``, at most ``end``."""
        run = self._states[index - self.start : end - self.start]
        return index + len(run) - len(run.lstrip(bytes([MISSING])))

    def not_arrived(self) -> list[int]:
        """Offsets from ``start`` of the blocks that did not arrive."""
        return [place for place, state in enumerate(self._states) if state != ARRIVED]
