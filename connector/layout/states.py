"""The parts of a recurrent state, so that a rank reads its share from an engine with another number of ranks.

A block of a state group has the whole state of a layer after some number of tokens: first the last inputs of the
convolution, then the recurrent matrix. vLLM cuts both over tensor-parallel ranks by heads: a rank has its columns of
each projection of the convolution (query, key, value; or input, B, C), and its heads of the matrix. Each such part is a
plane, with its own number of heads in the whole model. vLLM's own way to cut a state over ranks is in its module
``ssm_conv_transfer_utils``, for the layout DS only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

from shared.contracts.kv_exchange import KvPlane

SHARES_MAX = 64
"""Equal parts of a state that has no heads (Mamba 1)."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """One layer's state on one rank, as vLLM's ``MambaSpec`` describes it."""

    kind: str
    """The name of vLLM's backend for it."""
    shapes: tuple[tuple[int, ...], ...]
    itemsizes: tuple[int, ...]
    is_replicated: bool = False
    """Whether every rank holds the whole state."""
    is_column_first: bool = False
    """Whether a column of the convolution is contiguous (vLLM's layout DS), or a row of all columns (SD)."""

    @property
    def content_bytes(self) -> int:
        return sum(prod(shape) * size for shape, size in zip(self.shapes, self.itemsizes, strict=True))

    @property
    def conv_rows(self) -> int:
        return self.shapes[0][1 if self.is_column_first else 0]

    @property
    def conv_columns(self) -> int:
        return self.shapes[0][0 if self.is_column_first else 1]


@dataclass(frozen=True, slots=True)
class _Part:
    """Columns of the convolution that are cut over ranks together."""

    heads: int
    """Heads that the rank holds."""
    total: int
    columns: int
    """Columns of one head."""


def planes_of_state(state: StateShape, ranks: int, state_groups: int) -> list[KvPlane]:
    """The planes of a block. ``state_groups``: groups of B and C in the whole model (Mamba 2); 0: not known.

    A state whose parts are not known is one plane, which only an engine with as many ranks can read.
    """
    if state.is_replicated:
        return [KvPlane(offset=0, head_bytes=state.content_bytes, heads=1, total=1)]
    known = _parts_of(state, ranks, state_groups)
    if known is None:
        return [KvPlane(offset=0, head_bytes=state.content_bytes, heads=1, total=ranks)]
    conv, heads, total = known
    matrix_bytes = prod(state.shapes[1]) * state.itemsizes[1]
    matrix = KvPlane(
        offset=prod(state.shapes[0]) * state.itemsizes[0], head_bytes=matrix_bytes // heads, heads=heads, total=total
    )
    return [*_conv_planes(state, conv), matrix]


def _parts_of(state: StateShape, ranks: int, state_groups: int) -> tuple[list[_Part], int, int] | None:
    """The parts of the convolution, and the matrix' heads on the rank and in the whole model; None: not known."""
    if len(state.shapes) != 2 or len(state.shapes[0]) != 2:
        return None
    if state.kind == "MAMBA1":
        return _without_heads(state, ranks)
    if state.kind not in ("MAMBA2", "GDN_ATTN") or len(state.shapes[1]) != 3:
        return None
    heads, head_columns, side = state.shapes[1]
    rest = state.conv_columns - heads * head_columns
    if rest <= 0 or rest % (2 * side):
        return None
    whole = _Part(heads, heads * ranks, head_columns)
    sides = rest // (2 * side)
    if state.kind == "GDN_ATTN":
        keys = _Part(sides, sides * ranks, side)
        return [keys, keys, whole], heads, heads * ranks
    groups = state_groups or (sides * ranks if sides > 1 or ranks == 1 else 0)
    if not groups or sides != max(1, groups // ranks) or (groups % ranks and groups > 1):
        return None
    both = _Part(sides, groups, side)
    return [whole, both, both], heads, heads * ranks


def _without_heads(state: StateShape, ranks: int) -> tuple[list[_Part], int, int] | None:
    total = gcd(state.conv_columns * ranks, SHARES_MAX)
    if total % ranks or state.shapes[1][0] != state.conv_columns:
        return None
    heads = total // ranks
    return [_Part(heads, total, state.conv_columns // heads)], heads, total


def _conv_planes(state: StateShape, parts: list[_Part]) -> list[KvPlane]:
    rows, itemsize = state.conv_rows, state.itemsizes[0]
    planes = []
    at = 0
    if state.is_column_first:
        for part in parts:
            size = part.columns * rows * itemsize
            planes.append(KvPlane(offset=at, head_bytes=size, heads=part.heads, total=part.total))
            at += size * part.heads
        return planes
    for _ in range(rows):
        for part in parts:
            size = part.columns * itemsize
            planes.append(KvPlane(offset=at, head_bytes=size, heads=part.heads, total=part.total))
            at += size * part.heads
    return planes
