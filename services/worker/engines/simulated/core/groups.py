"""KV cache groups of simulated engines beside full attention: windows, or recurrent states."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from connector.groups import GroupPlan
from shared.contracts.kv_exchange import KvGroup, KvGroupKind
from shared.contracts.workers import HashScheme

Kind = Literal["full", "window", "state"]


class Shape(NamedTuple):
    """All groups have blocks of the same size."""

    groups: int
    """Number of groups beside full attention. Each has a block of its own at a boundary."""
    window_blocks: int = 1
    """Blocks of a window, up to a boundary, that a prompt needs there."""
    interval: int = 0
    """States are kept at a prompt's last boundary, and at multiples of so many blocks if a step ends there. 0: all
    blocks are kept.
    """


SHAPES: dict[Kind, Shape | None] = {
    "full": None,
    # As Gemma 3 has it, smaller: five layers with a window for each layer of full attention.
    "window": Shape(groups=5, window_blocks=8),
    # As Qwen3-Next has it: three layers with a state for each layer of full attention.
    "state": Shape(groups=3, interval=8),
}


class OtherGroups:
    """What an engine keeps beside full attention."""

    def __init__(self, shape: Shape, plan: GroupPlan) -> None:
        self.groups, self.window_blocks, self.interval = shape
        self._plan = plan
        self._block_size = plan.unit

    def needed(self, blocks: int) -> range:
        """Indices of the full blocks at whose ends a prompt needs what is kept, if it continues after so many."""
        return self._plan.needed(1, 0, blocks * self._block_size)

    @property
    def states(self) -> int:
        """Blocks with the states that a running sequence writes."""
        return self.groups if self.interval else 0

    @property
    def blocks_max(self) -> int:
        """Blocks of these groups at a boundary, at most."""
        return self.groups * self.window_blocks

    def blocks_at(self, blocks: int) -> int:
        """How many blocks these groups have at a boundary after so many full blocks."""
        return self.groups * len(self.needed(blocks))

    def keeps(self, blocks: int, computed: int, prompt_tokens: int) -> bool:
        """Whether what these groups have after so many blocks is kept when a step has computed so many tokens."""
        if not self.interval:
            return True
        is_due = blocks == (prompt_tokens - 1) // self._block_size or blocks % self.interval == 0
        return is_due and blocks * self._block_size == computed

    def step_tokens(self, count: int, computed: int, prompt_tokens: int) -> int:
        """How many of ``count`` tokens a step computes: it ends at the prompt's last boundary where a state is to be
        kept there.
        """
        left = (prompt_tokens - 1) // self._block_size * self._block_size - computed
        return min(count, left) if self.interval and left > 0 else count


@lru_cache
def other_groups(kind: Kind, block_size: int) -> OtherGroups | None:
    """None: the model has full attention alone."""
    shape = SHAPES[kind]
    return None if shape is None else OtherGroups(shape, group_plan(kind, block_size))


def group_plan(kind: Kind, block_size: int) -> GroupPlan:
    """The groups as peers know them: first full attention, then the others."""
    shape = SHAPES[kind]
    groups = [KvGroup(kind=KvGroupKind.FULL, block_size=block_size)]
    if shape is not None:
        kind_of = KvGroupKind.STATE if shape.interval else KvGroupKind.WINDOW
        window = 0 if shape.interval else shape.window_blocks * block_size
        groups += [KvGroup(kind=kind_of, block_size=block_size, window=window)] * shape.groups
    return GroupPlan(groups, block_size, block_size)


def hash_scheme(kind: Kind, block_size: int) -> HashScheme:
    """How simulated engines name blocks, and where prefixes can be of use."""
    shape = SHAPES[kind]
    if shape is None:
        return HashScheme(block_size=block_size, index_block=block_size)
    return HashScheme(
        block_size=block_size,
        index_block=block_size,
        boundaries=True,
        window_block=0 if shape.interval else block_size,
        window_blocks=shape.window_blocks,
    )
