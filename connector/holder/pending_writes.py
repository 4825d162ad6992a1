"""Blocks in the prefix cache whose KV is not written yet.

vLLM puts a block into its prefix cache when the step that fills it is *scheduled*. The KV is there only when the step
is *computed*, up to two steps later with asynchronous scheduling; a lease granted before would let a reader copy the
previous content. Only blocks that a step fills to the end count: a partly filled block has no hash, so it enters the
prefix cache with a later step, and steps are computed in order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol


class NewRequest(Protocol):
    """vLLM's NewRequestData: a request scheduled for the first time, with all its blocks."""

    req_id: str
    block_ids: Sequence[Sequence[int]]
    num_computed_tokens: int


class KnownRequests(Protocol):
    """vLLM's CachedRequestData: requests scheduled before, in parallel lists."""

    req_ids: Sequence[str]
    resumed_req_ids: Collection[str]
    """Resumed after a preemption: ``new_block_ids`` are all blocks of the request."""
    new_block_ids: Sequence[Sequence[Sequence[int]] | None]
    num_computed_tokens: Sequence[int]
    """Tokens computed before this step."""


class Step(Protocol):
    """The part of vLLM's SchedulerOutput that tells which blocks a step writes."""

    scheduled_new_reqs: Iterable[NewRequest]
    scheduled_cached_reqs: KnownRequests
    num_scheduled_tokens: Mapping[str, int]
    finished_req_ids: Collection[str]


class PendingWrites:
    """Follows each step from scheduling to computation. Runs in every step: costs O(requests in the step)."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._tables: dict[str, list[int]] = {}
        self._written = [0] * blocks
        """Number of the last scheduled step that fills each block."""
        self._scheduled = 0
        self._computed = 0
        """All steps up to this number are computed."""
        self._open: dict[int, int] = {}
        """``id()`` and number of each step that is scheduled and not computed, oldest first."""

    def __len__(self) -> int:
        """Requests that may still write."""
        return len(self._tables)

    def writes(self, block_id: int) -> bool:
        """Whether a scheduled step that is not computed yet fills this block."""
        return self._written[block_id] > self._computed

    def scheduled(self, step: Step) -> None:
        """Note a step before it is computed."""
        self._scheduled += 1
        self._open[id(step)] = self._scheduled
        for request_id in step.finished_req_ids:
            self._tables.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
            self._fill(new.req_id, new.num_computed_tokens, step.num_scheduled_tokens)
        known = step.scheduled_cached_reqs
        if known.req_ids:
            self._known_scheduled(known, step.num_scheduled_tokens)

    def computed(self, step: Step) -> None:
        """Note that a step is computed. Steps unknown to ``scheduled`` are ignored."""
        self._open.pop(id(step), None)
        self._computed = next(iter(self._open.values())) - 1 if self._open else self._scheduled

    def _known_scheduled(self, known: KnownRequests, tokens: Mapping[str, int]) -> None:
        resumed, size = known.resumed_req_ids, self.block_size
        for request_id, blocks, computed in zip(
            known.req_ids, known.new_block_ids, known.num_computed_tokens, strict=True
        ):
            if blocks is not None:
                if request_id in resumed:
                    self._tables[request_id] = list(blocks[0])
                else:
                    self._tables[request_id].extend(blocks[0])
            if computed % size + tokens[request_id] >= size:
                self._fill(request_id, computed, tokens)

    def _fill(self, request_id: str, computed: int, tokens: Mapping[str, int]) -> None:
        first, end = computed // self.block_size, (computed + tokens[request_id]) // self.block_size
        table = self._tables[request_id]
        assert end <= len(table), f"{request_id} fills block {end} of {len(table)}"
        for block_id in table[first:end]:
            self._written[block_id] = self._scheduled
