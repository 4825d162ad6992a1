"""Continuous batching: which sequence computes how many tokens in the next step, and on which blocks.

As in vLLM: running sequences first, in the order in which they came in, then those that wait, first come, first
served; long prompts in chunks; when no block is left the youngest running sequence gives up its own and is computed
again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import takewhile

from connector.reader.reader import Reader
from services.worker.engines.simulated.core.block_cache import BlockCache
from services.worker.engines.simulated.core.sequence import CACHE_THRESHOLD, Sequence
from services.worker.engines.simulated.core.settings import SimulationSettings

Plan = list[tuple[Sequence, int]]
"""Sequences and the number of tokens each computes."""


class Batch:
    """All unfinished sequences: running, waiting, or waiting for KV from other engines."""

    def __init__(self, settings: SimulationSettings, cache: BlockCache, reader: Reader) -> None:
        self._settings = settings
        self._cache = cache
        self._reader = reader
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.receiving: dict[str, Sequence] = {}
        """By request id; these hold blocks for all of their prompt, and some of those are being read."""
        self._received: deque[Sequence] = deque()
        """Their reads have ended."""
        self._still_written: dict[str, list[int]] = {}
        """Blocks of sequences that are gone, by request id, into which reads may still write."""
        self.refused: list[Sequence] = []
        """By the cache hit threshold; the caller empties it."""
        self.preemptions = 0

    def everyone(self) -> Iterator[Sequence]:
        """Every unfinished sequence."""
        yield from self.running
        yield from self.receiving.values()
        yield from self._received
        yield from self.waiting

    @property
    def queued(self) -> int:
        """Sequences that compute nothing yet."""
        return len(self.waiting) + len(self.receiving) + len(self._received)

    def add(self, sequence: Sequence) -> None:
        """Append to the queue."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It has finished or was aborted. The reader must know that already."""
        if self.receiving.pop(sequence.request_id, None) is not None:
            self._still_written[sequence.request_id], sequence.blocks = sequence.blocks, []
            return
        for group in (self.running, self._received, self.waiting):
            if sequence in group:
                group.remove(sequence)
                break
        self._give_up_blocks(sequence)

    def settle(self, now: float) -> bool:
        """Apply ended reads; returns whether any ended."""
        ended, empty = self._reader.settle()
        for request_id in ended:
            if request_id in self._still_written:
                self._cache.release(self._still_written.pop(request_id))
                continue
            sequence = self.receiving.pop(request_id)
            self._take_in(sequence, empty, now)
            self._received.append(sequence)
        return bool(ended)

    def plan(self, now: float) -> Plan:
        """The next step; empty if nothing can run now."""
        budget = self._settings.max_num_batched_tokens
        plan, preempted = self._plan_running(budget)
        budget -= sum(count for _, count in plan)
        budget = self._admit_received(plan, budget, now)
        if not preempted:
            self._admit_waiting(plan, budget, now)
        return plan

    def _plan_running(self, budget: int) -> tuple[Plan, bool]:
        plan: Plan = []
        preempted = False
        index = 0
        while index < len(self.running) and budget:
            sequence = self.running[index]
            count = min(len(sequence.tokens) - sequence.computed, budget)
            while not self._extend_blocks(sequence, sequence.computed + count):
                preempted = True
                if self._preempt_youngest() is sequence:
                    break
            else:
                plan.append((sequence, count))
                budget -= count
                index += 1
        return plan, preempted

    def _preempt_youngest(self) -> Sequence:
        victim = self.running.pop()
        self._give_up_blocks(victim)
        victim.computed = 0
        victim.num_preemptions += 1
        self.waiting.appendleft(victim)
        self.preemptions += 1
        return victim

    def _admit_received(self, plan: Plan, budget: int, now: float) -> int:
        while self._received and budget and len(self.running) < self._settings.max_num_seqs:
            budget -= self._run(self._received.popleft(), plan, budget, now)
        return budget

    def _admit_waiting(self, plan: Plan, budget: int, now: float) -> None:
        asking = 0
        while asking < len(self.waiting) and budget and len(self.running) + asking < self._settings.max_num_seqs:
            sequence = self.waiting[asking]
            if not self._hold_prefix(sequence):
                break
            fetched = self._reader.matched(sequence, sequence.wish.order, sequence.computed)
            if fetched is None and sequence.request_id not in self._reader.refused:
                self._give_up_blocks(sequence)
                asking += 1
                continue
            del self.waiting[asking]
            if fetched is None:
                self._refuse(sequence)
            elif fetched:
                self._receive(sequence, fetched, now)
            else:
                budget -= self._run(sequence, plan, budget, now)

    def _refuse(self, sequence: Sequence) -> None:
        self._reader.refused.remove(sequence.request_id)
        self._give_up_blocks(sequence)
        sequence.finish_reason = CACHE_THRESHOLD
        self.refused.append(sequence)

    def _run(self, sequence: Sequence, plan: Plan, budget: int, now: float) -> int:
        """Puts an admitted sequence into the step; its blocks are certain to be there."""
        count = min(len(sequence.tokens) - sequence.computed, budget)
        if not self._extend_blocks(sequence, sequence.computed + count):
            raise AssertionError("a sequence was admitted without room for its tokens")
        self._reader.allocated(sequence, sequence.blocks, 0)
        self._admit(sequence, now)
        if sequence.account.scheduled_at is None:
            sequence.account.scheduled_at = now
        self.running.append(sequence)
        plan.append((sequence, count))
        return count

    def _hold_prefix(self, sequence: Sequence) -> bool:
        """Holds what is cached of its tokens, if the rest of them has room as well."""
        size = self._settings.block_size
        # The last token is always computed: the next one follows from it.
        reusable = (len(sequence.tokens) - 1) // size
        held = self._cache.find(sequence.hashes, reusable)
        blocks_needed = -(-len(sequence.tokens) // size) - len(held)
        if blocks_needed > self._cache.room_beside(held):
            return False
        self._cache.hold(held)
        sequence.blocks = held
        sequence.computed = len(held) * size
        return True

    def _admit(self, sequence: Sequence, now: float) -> None:
        account = sequence.account
        if account.admitted_at is None:
            account.admitted_at = now
            account.cached_tokens = min(sequence.computed, sequence.prompt_tokens - 1)

    def _receive(self, sequence: Sequence, tokens: int, now: float) -> None:
        """Make room for all of the sequence and let the reads begin."""
        if not self._extend_blocks(sequence, len(sequence.tokens)):
            raise AssertionError("a sequence was admitted without room for its tokens")
        sequence.receiving = tokens // self._settings.block_size
        self._admit(sequence, now)
        self.receiving[sequence.request_id] = sequence
        self._reader.allocated(sequence, sequence.blocks, tokens)

    def _take_in(self, sequence: Sequence, empty: set[int], now: float) -> None:
        """Blocks count up to the first gap; the rest is computed, and so is always the last token."""
        size = self._settings.block_size
        here = sequence.computed // size
        arrived = takewhile(lambda block: block not in empty, sequence.blocks[here : here + sequence.receiving])
        tokens = min(len(list(arrived)) * size, len(sequence.tokens) - 1 - sequence.computed)
        sequence.receiving = 0
        sequence.computed += tokens
        self._name_blocks(sequence)
        if not sequence.num_preemptions:
            account = sequence.account
            account.received_tokens = tokens
            account.received_s = now - account.admitted_at if account.admitted_at is not None else 0.0
            account.received_bytes = tokens * self._settings.sim_kv_bytes_per_token

    def _name_blocks(self, sequence: Sequence) -> None:
        parent = None
        full_blocks = sequence.computed // self._settings.block_size
        for block, name in zip(sequence.blocks[:full_blocks], sequence.hashes, strict=False):
            self._cache.name(block, name, parent)
            parent = name

    def _extend_blocks(self, sequence: Sequence, tokens: int) -> bool:
        missing = -(-tokens // self._settings.block_size) - len(sequence.blocks)
        if missing <= 0:
            return True
        taken = self._cache.take(missing)
        if taken is None:
            return False
        sequence.blocks += taken
        return True

    def _give_up_blocks(self, sequence: Sequence) -> None:
        self._cache.release(sequence.blocks)
        sequence.blocks = []
