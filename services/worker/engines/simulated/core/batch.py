"""Sequences of the simulated engine, and how many tokens each computes in the next step: continuous batching.

As in vLLM, running sequences come first, in order of admission, then waiting ones, first come, first served. Long
prompts are computed in chunks. When no block is free, the youngest running sequence is preempted: it releases its
blocks and is computed again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import Any

from connector.reader.reader import Reader, Settled
from services.worker.engines.simulated.core.block_cache import BlockCache
from services.worker.engines.simulated.core.settings import SimulationSettings
from shared.contracts.kv_exchange import KvTransferReport, LegOrder

LENGTH, STOP, ABORT = "length", "stop", "abort"
CACHE_THRESHOLD = "cache_threshold"
"""Finish reason of a refused sequence: too little of its prompt was cached or could be fetched."""
NO_ORDER = LegOrder()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParams:
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Collection[int] = ()
    expected_tokens: int = -1
    """Prompt tokens that the router expects to be computed; -1: unknown."""
    cache_salt: str = ""
    """Only prompts with the same salt share blocks."""
    adapter: tuple[str, str] | None = None
    """LoRA adapter: the name, and what is hashed for its files."""
    order: LegOrder = NO_ORDER
    """The worker's order about KV."""

    def ending(self, token: int, generated: int, eos: int | None) -> str:
        """The finish reason if ``token``, the ``generated``-th of the completion, ends it; otherwise ""."""
        if generated >= self.min_tokens and ((token == eos and not self.ignore_eos) or token in self.stop_token_ids):
            return STOP
        return LENGTH if generated >= self.max_tokens else ""


@dataclass(slots=True)
class SequenceStats:
    """Where the prompt's KV came from, and when things happened (seconds, on the caller's clock)."""

    arrived_at: float
    admitted_at: float | None = None
    """When blocks were free for its prompt. Reads from other engines begin then."""
    scheduled_at: float | None = None
    """When it was first part of a step, after its reads had ended."""
    first_token_at: float | None = None
    is_prompt_computed: bool = False
    cached_tokens: int = 0
    received_tokens: int = 0
    received_bytes: int = 0
    received_s: float = 0.0
    transfer_report: KvTransferReport | None = None
    """Set at the first token, when the prompt is computed, and when the sequence has finished."""


@dataclass(slots=True, eq=False)
class Sequence:
    """``tokens``: prompt, then generated. KV exists for the first ``computed`` of them.

    It implements the ``EngineRequest`` of ``connector.reader``.
    """

    request_id: str
    owner: Any
    """Data of the caller, returned with every token."""
    prompt_tokens: int
    tokens: list[int]
    params: RequestParams
    stats: SequenceStats
    hashes: list[bytes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    kept: deque[list[int]] = field(default_factory=deque)
    """Blocks of the other groups that it holds, by the block of full attention with which they end."""
    states: list[int] = field(default_factory=list)
    """Blocks with the states that it goes on writing."""
    wrong: int = 0
    """Differs from 0 if the other groups held anything else than they should where it continued: then what it computes
    is wrong, too."""
    computed: int = 0
    receiving: int = 0
    """Number of blocks, after the computed ones, that are being read from other engines."""
    num_preemptions: int = 0
    finish_reason: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        return self.hashes

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def prompt_tokens_left(self) -> int:
        """Prompt tokens to compute: the expected number before it is first scheduled, the exact one after."""
        left = max(0, self.prompt_tokens - self.computed)
        waits = not self.computed and self.params.expected_tokens >= 0
        return min(left, self.params.expected_tokens) if waits else left


Plan = list[tuple[Sequence, int]]
"""Sequences and the number of tokens each computes."""


class Batch:
    """All unfinished sequences: running, waiting, or waiting for KV from other engines."""

    def __init__(self, settings: SimulationSettings, cache: BlockCache, reader: Reader) -> None:
        self._settings = settings
        self._cache = cache
        self._reader = reader
        self._others = settings.other_groups
        self._states = self._others.states if self._others is not None else 0
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.receiving: dict[str, Sequence] = {}
        """Sequences with blocks for their whole prompt, some of which KV is being read into, by request id."""
        self._received: deque[Sequence] = deque()
        """Sequences whose reads have ended."""
        self._still_written: dict[str, list[int]] = {}
        """Blocks of removed sequences, by request id, into which reads may still write."""
        self.refused: list[Sequence] = []
        """Sequences refused by the cache hit threshold. The caller empties the list."""
        self.preemptions = 0

    def unfinished(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.not_running()

    def not_running(self) -> Iterator[Sequence]:
        """Sequences that wait, also for KV from other engines."""
        yield from self.receiving.values()
        yield from self._received
        yield from self.waiting

    @property
    def queued(self) -> int:
        return len(self.waiting) + len(self.receiving) + len(self._received)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def begin(self, sequence: Sequence, token: int) -> bool:
        """Append the first token, which another engine generated, to a sequence that waits for its KV; False without
        memory for it.
        """
        if not self._extend_blocks(sequence, len(sequence.tokens) + 1):
            return False
        sequence.tokens.append(token)
        return True

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or aborted sequence. The reader must know already."""
        if self.receiving.pop(sequence.request_id, None) is not None:
            held = [*sequence.blocks, *chain.from_iterable(sequence.kept), *sequence.states]
            self._still_written[sequence.request_id] = held
            sequence.blocks, sequence.states = [], []
            sequence.kept.clear()
            return
        for group in (self.running, self._received, self.waiting):
            if sequence in group:
                group.remove(sequence)
                break
        self._release_blocks(sequence)

    def settle(self, now: float) -> bool:
        """Apply ended reads; returns whether any ended."""
        settled = self._reader.settle()
        for request_id in settled.ended:
            if request_id in self._still_written:
                self._cache.release(self._still_written.pop(request_id))
                continue
            sequence = self.receiving.pop(request_id)
            if request_id in settled.failed:
                self._try_again(sequence, settled.failed[request_id])
                continue
            self._accept_received(sequence, settled, now)
            self._received.append(sequence)
        return bool(settled.ended)

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
            count = self._next_tokens(sequence, budget)
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
        self._release_blocks(victim)
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
            boundary = self._hold_prefix(sequence)
            if boundary is None:
                break
            fetched = self._reader.matched(sequence, sequence.params.order, sequence.computed)
            if fetched is None and sequence.request_id not in self._reader.refused:
                self._release_blocks(sequence)
                sequence.computed = 0
                asking += 1
                continue
            del self.waiting[asking]
            if fetched is None:
                self._refuse(sequence)
            elif fetched:
                self._receive(sequence, fetched, now)
            else:
                self._continue_at(sequence, boundary)
                budget -= self._run(sequence, plan, budget, now)

    def _refuse(self, sequence: Sequence) -> None:
        self._reader.refused.remove(sequence.request_id)
        self._release_blocks(sequence)
        sequence.finish_reason = CACHE_THRESHOLD
        self.refused.append(sequence)

    def _run(self, sequence: Sequence, plan: Plan, budget: int, now: float) -> int:
        """Put an admitted sequence into the step; enough blocks are free for it."""
        count = self._next_tokens(sequence, budget)
        if not self._extend_blocks(sequence, sequence.computed + count):
            raise AssertionError("a sequence was admitted without free blocks for its tokens")
        self._reader.allocated(sequence, [sequence.blocks], 0)
        self._admit(sequence, now)
        if sequence.stats.scheduled_at is None:
            sequence.stats.scheduled_at = now
        self.running.append(sequence)
        plan.append((sequence, count))
        return count

    def _hold_prefix(self, sequence: Sequence) -> int | None:
        """Hold what is cached of full attention, if there are blocks for the remaining tokens as well; returns after
        how many of its blocks all groups can continue, or None without room. Full attention beyond counts if a fetch
        can bring what the others lack, up to less than the end of the fetch: otherwise nothing would be fetched.
        """
        size, cache, others = self._settings.block_size, self._cache, self._others
        # The last token is always computed, since the next one follows from it.
        held = cache.find(sequence.hashes, (len(sequence.tokens) - 1) // size)
        boundary = cache.boundary(sequence.hashes, len(held))
        blocks = -(-len(sequence.tokens) // size) + self._states
        kept = chain.from_iterable(cache.kept_at(sequence.hashes, boundary))
        if blocks - boundary > cache.free_after_holding([*held[:boundary], *kept]):
            return None
        here = boundary
        if others is not None:
            goal = self._reader.goal(sequence, sequence.params.order, boundary * size)
            if goal > boundary * size:
                here = max(boundary, min(len(held), (goal - 1) // size))
                if blocks - here + others.blocks_at(goal // size) > cache.free_after_holding(held[:here]):
                    return None
        del held[here:]
        cache.hold(held)
        sequence.blocks = held
        sequence.computed = here * size
        sequence.wrong = 0
        return boundary

    def _continue_at(self, sequence: Sequence, boundary: int) -> None:
        """Nothing is fetched: keep the held blocks up to the boundary, and hold what the other groups have there."""
        if self._others is None:
            return
        self._cache.release(sequence.blocks[boundary:])
        del sequence.blocks[boundary:]
        sequence.computed = boundary * self._settings.block_size
        for index in self._others.needed(boundary):
            kept = self._hold_kept(sequence, index)
            assert kept is not None, "it was cached a moment ago"
            sequence.wrong ^= self._cache.wrong(sequence.blocks[index], kept)

    def _next_tokens(self, sequence: Sequence, budget: int) -> int:
        count = min(len(sequence.tokens) - sequence.computed, budget)
        if self._others is None:
            return count
        return self._others.step_tokens(count, sequence.computed, sequence.prompt_tokens)

    def keep(self, sequence: Sequence, blocks: int) -> None:
        """So many of its blocks are full: keep what the other groups need after them. Called at the end of a step."""
        others = self._others
        if others is not None and others.keeps(blocks, sequence.computed, sequence.prompt_tokens):
            self._hold_kept(sequence, blocks - 1)

    def _hold_kept(self, sequence: Sequence, index: int) -> list[int] | None:
        """Hold the blocks of the other groups that end with this full block, while it is within their window; those of
        a state are a copy, which it does not use any more. None: too few are free.
        """
        kept = self._cache.keep(sequence.hashes[index], sequence.blocks[index])
        if kept is not None:
            sequence.kept.append(kept)
            self._drop_kept(sequence)
        return kept

    def _drop_kept(self, sequence: Sequence) -> None:
        """Release what it holds of the other groups and does not use any more."""
        assert self._others is not None
        while len(sequence.kept) > (0 if self._others.interval else self._others.window_blocks):
            self._cache.release(sequence.kept.popleft())

    def _admit(self, sequence: Sequence, now: float) -> None:
        stats = sequence.stats
        if stats.admitted_at is None:
            stats.admitted_at = now
            stats.cached_tokens = min(sequence.computed, sequence.prompt_tokens - 1)

    def _receive(self, sequence: Sequence, tokens: int, now: float) -> None:
        """Allocate blocks for the whole sequence and start the reads."""
        if not self._extend_blocks(sequence, len(sequence.tokens)):
            raise AssertionError("a sequence was admitted without free blocks for its tokens")
        sequence.receiving = tokens // self._settings.block_size
        tables = [sequence.blocks, *self._take_kept(sequence, tokens)]
        self._admit(sequence, now)
        self.receiving[sequence.request_id] = sequence
        self._reader.allocated(sequence, tables, tokens, [(), *map(set, tables[1:])])

    def _take_kept(self, sequence: Sequence, tokens: int) -> list[list[int]]:
        """Blocks for what the other groups need at the end of a fetch, by group, each at its place in the prompt."""
        if self._others is None:
            return []
        needed = self._others.needed((sequence.computed + tokens) // self._settings.block_size)
        for _index in needed:
            taken = self._cache.take(self._others.groups)
            assert taken is not None, "a sequence was admitted without free blocks for what it fetches"
            sequence.kept.append(taken)
        before = [0] * needed.start
        return [[*before, *of_group] for of_group in zip(*sequence.kept, strict=True)]

    def _accept_received(self, sequence: Sequence, settled: Settled, now: float) -> None:
        """Accept received blocks up to the first gap. The rest is computed, and always the last token."""
        size = self._settings.block_size
        here = sequence.computed // size
        arrived = takewhile(lambda block: block not in settled.empty, sequence.blocks[here : here + sequence.receiving])
        tokens = min(len(list(arrived)) * size, len(sequence.tokens) - 1 - sequence.computed)
        sequence.receiving = 0
        sequence.computed += tokens
        self._name_blocks(sequence)
        kept = self._accept_kept(sequence)
        if not sequence.num_preemptions:
            stats = sequence.stats
            stats.received_tokens = tokens
            stats.received_s = now - stats.admitted_at if stats.admitted_at is not None else 0.0
            stats.received_bytes = (tokens + kept * size) * self._settings.kv_bytes_per_token

    def _accept_kept(self, sequence: Sequence) -> int:
        """Name what arrived of the other groups; returns how many blocks that were."""
        if self._others is None:
            return 0
        boundary = sequence.computed // self._settings.block_size
        for index, kept in zip(self._others.needed(boundary), sequence.kept, strict=True):
            self._cache.name_kept(sequence.hashes[index], kept)
            sequence.wrong ^= self._cache.wrong(sequence.blocks[index], kept)
        self._drop_kept(sequence)
        return self._others.blocks_at(boundary)

    def _try_again(self, sequence: Sequence, full_end: int) -> None:
        """Not all of a boundary arrived, so none of it is of use: ask again, as the first of those that wait. Full
        attention that arrived is cached.
        """
        sequence.computed = full_end
        self._name_blocks(sequence)
        self._release_blocks(sequence)
        sequence.computed = sequence.receiving = 0
        if not sequence.num_preemptions:
            sequence.stats.admitted_at = None
        self.waiting.appendleft(sequence)

    def _name_blocks(self, sequence: Sequence) -> None:
        parent = None
        full_blocks = sequence.computed // self._settings.block_size
        for block, name in zip(sequence.blocks[:full_blocks], sequence.hashes, strict=False):
            self._cache.name(block, name, parent)
            parent = name

    def _extend_blocks(self, sequence: Sequence, tokens: int) -> bool:
        missing = max(0, -(-tokens // self._settings.block_size) - len(sequence.blocks))
        states = self._states - len(sequence.states)
        if not missing + states:
            return True
        taken = self._cache.take(missing + states)
        if taken is None:
            return False
        sequence.blocks += taken[:missing]
        sequence.states += taken[missing:]
        return True

    def _release_blocks(self, sequence: Sequence) -> None:
        while sequence.kept:
            self._cache.release(sequence.kept.pop())
        self._cache.release(sequence.blocks)
        self._cache.release(sequence.states)
        sequence.blocks, sequence.states = [], []
