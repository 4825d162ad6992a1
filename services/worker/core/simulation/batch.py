"""Continuous batching: which sequence computes how many tokens in the next step, and on which blocks.

As in vLLM: running sequences first, in the order in which they came in, then those that wait, first come, first
served; long prompts in chunks; when no block is left the youngest running sequence gives up its own and is computed
again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from services.worker.core.simulation.block_cache import BlockCache
from services.worker.core.simulation.handoff import matching_contents
from services.worker.core.simulation.sequence import Sequence
from services.worker.core.simulation.settings import SimulationSettings
from services.worker.core.simulation.timing import TransferLink

Plan = list[tuple[Sequence, int]]
"""Sequences and the number of tokens each computes."""


class Batch:
    """All unfinished sequences: running, waiting, or waiting for KV from another engine."""

    def __init__(self, settings: SimulationSettings, cache: BlockCache) -> None:
        self._settings = settings
        self._cache = cache
        self._link = TransferLink(settings)
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.receiving: list[Sequence] = []
        """These hold blocks for all of their prompt already."""
        self.preemptions = 0

    def everyone(self) -> Iterator[Sequence]:
        """Every unfinished sequence."""
        yield from self.running
        yield from self.receiving
        yield from self.waiting

    def add(self, sequence: Sequence) -> None:
        """At the end of the queue."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It has finished or nobody wants it any more."""
        for group in (self.running, self.waiting, self.receiving):
            if sequence in group:
                group.remove(sequence)
                break
        self._give_up_blocks(sequence)

    def next_arrival(self) -> float | None:
        """When KV that is under way arrives next."""
        return min((s.arrives_at for s in self.receiving if s.arrives_at is not None), default=None)

    def plan(self, now: float) -> Plan:
        """The next step; empty if there is nothing to do now."""
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
        self.waiting.appendleft(victim)
        self.preemptions += 1
        return victim

    def _admit_received(self, plan: Plan, budget: int, now: float) -> int:
        for sequence in list(self.receiving):
            if not budget or len(self.running) >= self._settings.max_num_seqs:
                break
            if sequence.arrives_at is not None and sequence.arrives_at <= now:
                self.receiving.remove(sequence)
                sequence.arrives_at = None
                self._name_blocks(sequence)
                budget -= self._run(sequence, plan, budget, now)
        return budget

    def _admit_waiting(self, plan: Plan, budget: int, now: float) -> None:
        while self.waiting and budget and len(self.running) < self._settings.max_num_seqs:
            sequence = self.waiting[0]
            if not self._hold_prefix(sequence):
                break
            self.waiting.popleft()
            if self._receive(sequence, now):
                self.receiving.append(sequence)
            else:
                budget -= self._run(sequence, plan, budget, now)

    def _run(self, sequence: Sequence, plan: Plan, budget: int, now: float) -> int:
        """Puts an admitted sequence into the step; its blocks are certain to be there."""
        count = min(len(sequence.tokens) - sequence.computed, budget)
        if not self._extend_blocks(sequence, sequence.computed + count):
            raise AssertionError("a sequence was admitted without room for its tokens")
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
        if sequence.account.scheduled_at is None:
            sequence.account.cached_tokens = sequence.computed
        return True

    def _receive(self, sequence: Sequence, now: float) -> bool:
        """Begins to load the offered blocks that are not here, once in a sequence's life."""
        offered = sequence.wish.transfer
        account = sequence.account
        if offered is None or not offered.do_remote_prefill or account.scheduled_at is not None:
            return False
        size, here = self._settings.block_size, len(sequence.blocks)
        reusable = (len(sequence.tokens) - 1) // size
        contents = matching_contents(offered, sequence.hashes[:reusable], size)[here:]
        if not contents:
            return False
        if not self._extend_blocks(sequence, len(sequence.tokens)):
            raise AssertionError("a sequence was admitted without room for its tokens")
        for block, content in zip(sequence.blocks[here:], contents, strict=False):
            self._cache.contents[block] = content
        account.scheduled_at = now
        account.received_tokens = len(contents) * size
        account.received_bytes = account.received_tokens * self._settings.sim_kv_bytes_per_token
        sequence.computed += account.received_tokens
        sequence.arrives_at = self._link.arrival(account.received_bytes, now)
        account.received_s = sequence.arrives_at - now
        return True

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
