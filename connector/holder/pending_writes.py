"""Blocks in the prefix cache whose KV is not written yet.

vLLM puts a block into its prefix cache when the step that fills it is *scheduled*. The KV is there only when the step
is *computed*, up to two steps later with asynchronous scheduling; a lease granted before would let a reader copy the
previous content. So each block that enters the prefix cache while vLLM schedules is stamped with that step's number.
Blocks that arrived from elsewhere are stamped too if vLLM names them while it schedules: they are ready a step late.
"""

from __future__ import annotations

from typing import Any


class PendingWrites:
    """Follows each step from scheduling to computation. Costs one store for each block that is named."""

    def __init__(self, blocks: int) -> None:
        self._stamps = [0] * blocks
        """Number of the step in which each block was last named."""
        self._scheduled = 0
        self._computed = 0
        """All steps up to this number are computed."""
        self._is_scheduling = False
        self._open: dict[int, int] = {}
        """``id()`` and number of each step that is scheduled and not computed, oldest first."""

    def writes(self, block_id: int) -> bool:
        """Whether a step that is not computed yet fills this block."""
        return self._stamps[block_id] > self._computed

    def begin_step(self) -> None:
        """The engine begins to schedule a step: the blocks that it names until ``scheduled`` are filled by the step."""
        self._is_scheduling = True

    def named(self, block_id: int) -> None:
        """The block enters the prefix cache, or gets one more hash there. Between two steps only blocks with written KV
        do.
        """
        if self._is_scheduling:
            self._stamps[block_id] = self._scheduled + 1

    def scheduled(self, step: object) -> None:
        """Note a step before it is computed."""
        self._is_scheduling = False
        self._scheduled += 1
        self._open[id(step)] = self._scheduled

    def computed(self, step: object) -> None:
        """Note that a step is computed. Steps unknown to ``scheduled`` are ignored."""
        self._open.pop(id(step), None)
        self._computed = next(iter(self._open.values())) - 1 if self._open else self._scheduled

    def watch(self, pool: Any, *, names_again: bool) -> None:
        """Have vLLM's block pool report each block that it names: all of its ways to name one pass this method.
        ``names_again``: the model has hashes inside blocks, which vLLM gives to a block again in every step.
        """
        insert = pool._insert_block_hash
        names = pool.cached_block_hash_to_block if names_again else None

        def insert_and_note(key: Any, block: Any, num_tokens: int | None) -> None:
            if names is None or not names.contain(key, block.block_id):
                self.named(block.block_id)
            insert(key, block, num_tokens)

        pool._insert_block_hash = insert_and_note
