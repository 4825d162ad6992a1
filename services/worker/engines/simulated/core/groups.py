"""KV cache groups of the simulated engine beside full attention: windows, or recurrent states."""

from __future__ import annotations

from typing import Literal, NamedTuple

from shared.contracts.kv_exchange import KvGroup, KvGroupKind

Kind = Literal["full", "window", "state"]


class OtherGroups(NamedTuple):
    """What a model keeps beside full attention. All groups have blocks of the same size."""

    groups: int
    """Each has a block of its own at a boundary."""
    window_blocks: int = 1
    """Blocks of a window, up to a boundary, that a prompt needs there."""
    interval: int = 0
    """States are kept at a prompt's last boundary, and at multiples of so many blocks if a step ends there. 0: all
    blocks are kept.
    """

    def needed(self, blocks: int) -> range:
        """The numbers of full blocks at which a prompt needs what is kept, if it continues after so many."""
        return range(max(0, blocks - self.window_blocks) + 1, blocks + 1)

    @property
    def blocks_max(self) -> int:
        """Blocks of these groups that a sequence needs, at most."""
        return self.groups * self.window_blocks

    def blocks_at(self, blocks: int) -> int:
        """How many blocks these groups have at a boundary after so many full blocks."""
        return self.groups * len(self.needed(blocks))


OTHER_GROUPS: dict[Kind, OtherGroups | None] = {
    "full": None,
    # As Gemma 3 has it, smaller: five layers with a window for each layer of full attention.
    "window": OtherGroups(groups=5, window_blocks=8),
    # As Qwen3-Next has it: three layers with a state for each layer of full attention.
    "state": OtherGroups(groups=3, interval=8),
}


def kv_groups(others: OtherGroups | None, block_size: int) -> list[KvGroup]:
    """The groups as peers know them: first full attention, then the others."""
    groups = [KvGroup(kind=KvGroupKind.FULL, block_size=block_size)]
    if others is not None:
        kind = KvGroupKind.STATE if others.interval else KvGroupKind.WINDOW
        window = 0 if others.interval else others.window_blocks * block_size
        groups += [KvGroup(kind=kind, block_size=block_size, window=window)] * others.groups
    return groups
