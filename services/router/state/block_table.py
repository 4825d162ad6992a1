"""Which row holds which block in which memory tier: the port of the prefix index, and its Python implementation.

A *row* is a small number that stands for a worker. Hashes come packed as on the wire (8 bytes each, big-endian) or as a
sequence of integers. ``native/block_table.c`` is the implementation in C.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shared.contracts.kv_events import MEMORIES, NARROW_MARK, KvTier, digest_xor, pack_hashes, unpack_hashes

TIERS = tuple(KvTier)
"""A tier's index here is its number in every table."""
BOUNDARY = TIERS.index(KvTier.BOUNDARY)
DEVICE = TIERS.index(KvTier.DEVICE)
LOST_MAX = 16384
"""Blocks that nobody holds any more and that are remembered."""
EVICTED_MAX = 65536
"""Evictions that are counted until all counts are halved, so that old ones are forgotten."""

Hashes = bytes | Sequence[int]
Depths = NDArray[np.int32]
"""Number of blocks that each row holds without a gap from the start of a chain."""
Mask = NDArray[np.bool_]
"""Whether each row may be used."""
Source = tuple[int, int, int]
"""A row, the first block to take from it, and the block to stop before."""


class Boundaries(NamedTuple):
    """Which prefixes of a model can be of use, all in hashes: see ``HashScheme``. A boundary is a multiple of ``step``
    that full attention reaches, with whole blocks or a partial one, which has the boundary's own hash. A row holds it
    if it holds so many ``window_blocks`` in the tier BOUNDARY, the last of which ends there, or all from the prompt's
    beginning. Full attention, and those blocks, may have to go beyond the boundary.
    """

    stride: int
    """Hashes of a full-attention block; 0: the model has none."""
    step: int = 1
    window: int = 1
    """Hashes of a window's block, of which ``step`` is a multiple."""
    window_blocks: int = 1
    full_beyond: int = 0
    window_beyond: int = 0
    narrow: bool = False
    """The last of the blocks must be held under its hash XOR ``NARROW_MARK``, too."""
    short: int = 0
    """So many hashes before a boundary a request continues for which the blocks from the prompt's beginning on are
    fewer than ``window_blocks``.
    """


class BlockTable(Protocol):
    """Holders of blocks. Storing a held block and removing an absent one change nothing. Packed hashes whose length is
    not a multiple of 8 bytes raise ValueError before anything is changed.
    """

    def store(self, row: int, tier: int, hashes: Hashes) -> None:
        """``row`` holds these blocks in this tier."""

    def remove(self, row: int, tier: int, hashes: Hashes) -> None:
        """``row`` does not hold these blocks in this tier any more."""

    def expect(self, tier: int, hashes: Hashes) -> None:
        """These blocks will be stored or removed soon: their memory may be fetched meanwhile."""

    def clear(self, row: int) -> None:
        """``row`` holds nothing, in any tier."""

    def count(self, row: int) -> int:
        """Blocks that ``row`` holds; one that lies in two tiers counts twice."""

    def xor(self, row: int) -> int:
        """As in ``KvDigest.xor``."""

    def evictions(self, row: int) -> tuple[int, int]:
        """Blocks that ``row`` lately removed from the tier DEVICE, and blocks that it lately stored although some row
        had had them: nobody held them in any memory any more. Of large caches, only a sample of the blocks is counted.
        """

    def blocks(self, row: int, tier: int) -> bytes:
        """All that ``row`` holds in this tier, packed, in no order. Reads the whole table: not for the request path."""

    def held(self, block: int) -> bool:
        """Whether any row holds ``block`` in any tier. From any thread."""

    def depths(self, hashes: Hashes, out: Depths) -> None:
        """The longest match of every row in any memory, written into ``out``; rows beyond its length are left out."""

    def boundaries(self, hashes: Hashes, at: Boundaries, out: Depths) -> None:
        """The longest usable prefix of every row, in hashes, of a model with boundaries, written into ``out``."""

    def cover(self, hashes: Hashes, first: int, end: int, allowed: Mask) -> list[Source]:
        """The fewest rows among ``allowed`` that together hold the blocks from ``first`` to before ``end``, each with
        its part; as far as the first block that none of them holds. Of equals the lowest row.
        """

    def size(self) -> int:
        """Number of (block, tier) pairs that any row holds."""


class PythonBlockTable:
    """In plain dictionaries: a block's holders are one integer with a bit for each row."""

    def __init__(self) -> None:
        self._holders: tuple[dict[int, int], ...] = tuple({} for _ in TIERS)
        self._held: dict[int, tuple[set[int], ...]] = {}
        self._xors: dict[int, list[int]] = {}
        self._evictions: dict[int, list[int]] = {}
        self._evicted = 0
        self._lost: dict[int, int] = {}
        """Blocks that nobody holds any more, by their places, as in C."""

    def store(self, row: int, tier: int, hashes: Hashes) -> None:
        """See ``BlockTable``."""
        holders, held, bit = self._holders[tier], self._rows(row)[tier], 1 << row
        xor, sampled = 0, self._unsampled_bits()
        for block in numbers(hashes):
            if block not in held:
                held.add(block)
                xor ^= block
                if block not in holders:
                    self._note_stored(row, tier, block, sampled)
                holders[block] = holders.get(block, 0) | bit
        self._xors[row][tier] ^= xor

    def remove(self, row: int, tier: int, hashes: Hashes) -> None:
        """See ``BlockTable``."""
        held, xor, sampled = self._rows(row)[tier], 0, self._unsampled_bits()
        for block in numbers(hashes):
            if block in held:
                held.remove(block)
                xor ^= block
                self._release(block, tier, 1 << row)
                self._note_evicted(row, tier, block, sampled)
        self._xors[row][tier] ^= xor

    def expect(self, tier: int, hashes: Hashes) -> None:
        """See ``BlockTable``; there is nothing to do."""

    def clear(self, row: int) -> None:
        """See ``BlockTable``."""
        for tier, held in enumerate(self._held.pop(row, ())):
            for block in held:
                self._release(block, tier, 1 << row)
        self._xors.pop(row, None)
        self._evictions.pop(row, None)

    def count(self, row: int) -> int:
        """See ``BlockTable``."""
        return sum(map(len, self._held.get(row, ())))

    def xor(self, row: int) -> int:
        """See ``BlockTable``."""
        return digest_xor(self._xors.get(row, ()))

    def evictions(self, row: int) -> tuple[int, int]:
        """See ``BlockTable``."""
        evicted, restored = self._evictions.get(row, (0, 0))
        return evicted, restored

    def blocks(self, row: int, tier: int) -> bytes:
        """See ``BlockTable``."""
        held = self._held.get(row)
        return pack_hashes(held[tier]) if held is not None else b""

    def held(self, block: int) -> bool:
        """See ``BlockTable``."""
        return any(block in holders for holders in self._holders)

    def depths(self, hashes: Hashes, out: Depths) -> None:
        """See ``BlockTable``."""
        out[:] = 0
        alive = -1
        depth = 0
        for depth, now in enumerate(self._masks(numbers(hashes))):
            still = alive & now
            if still != alive:
                if depth:
                    write(out, alive & ~still, depth)
                alive = still
                if not alive:
                    return
        if alive != -1:
            write(out, alive, depth + 1)

    def boundaries(self, hashes: Hashes, at: Boundaries, out: Depths) -> None:
        """See ``BlockTable``."""
        stride, step, window, blocks, full_beyond, window_beyond, is_narrow, short = at
        may_be_partial = not full_beyond and not window_beyond
        chain, holders, rows = numbers(hashes), self._holders[BOUNDARY], len(out)
        reach: Depths = np.zeros(rows, np.int32)
        if stride:
            self.depths(chain[stride - 1 :: stride], reach)
        out[:] = 0
        begun: dict[int, tuple[int, int]] = {}
        """The boundary of each row whose window's blocks are being counted, and their number so far."""
        for end in range(len(chain) // window * window, 0, -window):
            left = holders.get(chain[end - 1], 0)
            named = next(self._masks([chain[end - 1]])) if left else 0
            begun = {row: count for row, count in begun.items() if left >> row & 1}
            while left:
                row, left = lowest(left), left & (left - 1)
                if row >= rows or out[row]:
                    continue
                boundary, count = begun.get(row, (end - window_beyond, 0))
                if not count:
                    full, whole = boundary + full_beyond, int(reach[row]) * stride
                    is_partial = may_be_partial and full < whole + stride and bool(named >> row & 1)
                    reached = not stride or full <= whole or is_partial
                    if boundary <= 0 or boundary % step or not reached:
                        continue
                    if is_narrow and not holders.get(chain[end - 1] ^ NARROW_MARK, 0) >> row & 1:
                        continue
                begun[row] = boundary, count + 1
                if count + 1 >= blocks:
                    out[row] = boundary
        for row, (boundary, _count) in begun.items():
            out[row] = out[row] or max(0, boundary - short)

    def cover(self, hashes: Hashes, first: int, end: int, allowed: Mask) -> list[Source]:
        """See ``BlockTable``."""
        mask = int.from_bytes(np.packbits(allowed, bitorder="little").tobytes(), "little")
        sources: list[Source] = []
        alive = begin = 0
        position = first
        for now in self._masks(numbers(hashes)[first:end]):
            if not alive & now:
                if alive:
                    sources.append((lowest(alive), begin, position))
                alive, begin = mask, position
                if not alive & now:
                    return sources
            alive &= now
            position += 1
        return [*sources, (lowest(alive), begin, position)] if alive else sources

    def size(self) -> int:
        """See ``BlockTable``."""
        return sum(map(len, self._holders))

    def _masks(self, hashes: Sequence[int]) -> Iterator[int]:
        """The holders of each block, in any tier."""
        device, *others = self._holders[: len(MEMORIES)]
        others = [holders for holders in others if holders]
        if not others:
            return (device.get(block, 0) for block in hashes)
        return (reduce(or_, (holders.get(block, 0) for holders in others), device.get(block, 0)) for block in hashes)

    def _rows(self, row: int) -> tuple[set[int], ...]:
        held = self._held.get(row)
        if held is None:
            held = self._held[row] = tuple(set[int]() for _ in TIERS)
            self._xors[row] = [0] * len(TIERS)
            self._evictions[row] = [0, 0]
        return held

    def _unsampled_bits(self) -> int:
        """Where DEVICE has more blocks than are remembered, only those are counted whose hash ends with so many zeros:
        so those remembered reach back about as far as the caches.
        """
        return (len(self._holders[DEVICE]) // LOST_MAX).bit_length()

    def _note_evicted(self, row: int, tier: int, block: int, bits: int) -> None:
        """The row has lost the block of this tier."""
        if tier >= len(MEMORIES) or block & ((1 << bits) - 1):
            return
        if tier == DEVICE:
            self._evictions[row][0] += 1
            self._evicted += 1
            if self._evicted >= EVICTED_MAX:
                self._evicted //= 2
                self._evictions = {one: [count // 2 for count in counts] for one, counts in self._evictions.items()}
        if block and not any(block in holders for holders in self._holders[: len(MEMORIES)]):
            self._lost[(block >> bits) % LOST_MAX] = block

    def _note_stored(self, row: int, tier: int, block: int, bits: int) -> None:
        """The row has got a block of this tier that nobody held there."""
        place = (block >> bits) % LOST_MAX
        if tier < len(MEMORIES) and not block & ((1 << bits) - 1) and self._lost.get(place) == block:
            del self._lost[place]
            self._evictions[row][1] += 1

    def _release(self, block: int, tier: int, bit: int) -> None:
        holders = self._holders[tier]
        left = holders[block] & ~bit
        if left:
            holders[block] = left
        else:
            del holders[block]


def numbers(hashes: Hashes) -> Sequence[int]:
    """As integers. Raises ValueError on packed hashes that are not whole."""
    return unpack_hashes(hashes) if isinstance(hashes, bytes) else hashes


def lowest(mask: int) -> int:
    """The lowest row in ``mask``."""
    return (mask & -mask).bit_length() - 1


def write(out: NDArray[Any], mask: int, depth: int) -> None:
    """``depth`` for every row in ``mask``."""
    bits = np.frombuffer(mask.to_bytes(mask.bit_length() // 8 + 1, "little"), np.uint8)
    rows = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    out[rows[rows < len(out)]] = depth


try:
    from services.router.native._block_table import NativeBlockTable
except ImportError:
    IS_COMPILED = False
else:
    IS_COMPILED = True


def block_table() -> BlockTable:
    """The fastest implementation available."""
    return NativeBlockTable() if IS_COMPILED else PythonBlockTable()
