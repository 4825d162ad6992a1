"""KV cache groups of the simulated engine beside full attention: windows, or recurrent states."""

from __future__ import annotations

from typing import Literal, NamedTuple

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


OTHER_GROUPS: dict[Kind, OtherGroups | None] = {
    "full": None,
    # As Gemma 3 has it, smaller: five layers with a window for each layer of full attention.
    "window": OtherGroups(groups=5, window_blocks=8),
    # As Qwen3-Next has it: three layers with a state for each layer of full attention.
    "state": OtherGroups(groups=3, interval=8),
}
