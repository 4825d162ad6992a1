"""The simulated engine itself: sequences go in, tokens come out, and the caller's clock decides when.

core.add(owner, tokens, wish, now)
for sequence, token in core.advance(now): ...     # the tokens of a step that has ended; then the next one begins
core.wakes_at()                                   # when to call advance again; None: only after the next add
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.worker.core.simulation import handoff
from services.worker.core.simulation.batch import Batch, Plan
from services.worker.core.simulation.block_cache import BlockCache
from services.worker.core.simulation.block_hashes import BlockHasher
from services.worker.core.simulation.measures import Measures
from services.worker.core.simulation.sequence import ABORT, Account, Sequence, Wish
from services.worker.core.simulation.settings import SimulationSettings
from services.worker.core.simulation.timing import step_s
from services.worker.core.simulation.tokens import ROOT_CONTENT, TokenSampler, block_content

CATCH_UP_S_MAX = 0.02
"""A caller who is late by less does not slow the engine down: the next step counts as begun on time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTokens:
    """The model's vocabulary, as far as the simulation needs it."""

    size: int
    """Ids are below this."""
    sayable: list[int]
    """Ids that answers are made of."""
    eos: int | None = None


@dataclass(slots=True)
class _Step:
    ends_at: float
    took_s: float
    prefill_tokens: int
    decoding: int
    sampled: list[tuple[Sequence, int]]


class EngineCore:
    """One simulated engine. Not thread-safe; no call waits."""

    def __init__(self, settings: SimulationSettings, model: ModelTokens) -> None:
        self.settings = settings
        self.cache = BlockCache(settings.kv_blocks)
        self.batch = Batch(settings, self.cache)
        self.measures = Measures()
        self._hasher = BlockHasher(settings.block_size, model.size)
        self._sampler = TokenSampler(model.sayable, model.eos)
        self._eos = model.eos
        self._step: _Step | None = None

    def add(self, owner: Any, tokens: list[int], wish: Wish, now: float) -> Sequence:
        """Queue a prompt; the list becomes the sequence's own. Raises ValueError for one that cannot be served."""
        room = self.settings.max_model_len - len(tokens)
        if not tokens or not 1 <= wish.max_tokens <= room:
            raise ValueError(f"{len(tokens)} prompt tokens and {wish.max_tokens} more do not fit this engine")
        sequence = Sequence(
            owner=owner, prompt_tokens=len(tokens), tokens=tokens, wish=wish, account=Account(arrived_at=now)
        )
        self._hasher.extend(sequence.hashes, tokens, wish.cache_salt)
        self.batch.add(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Forget it, whatever it is doing; its memory is free at once. Harmless for one that has finished."""
        if not sequence.finish_reason:
            sequence.finish_reason = ABORT
            self.batch.remove(sequence)

    def advance(self, now: float) -> list[tuple[Sequence, int]]:
        """End the step that is over, begin the next. Returns the ended one's new tokens; see ``finish_reason``."""
        tokens: list[tuple[Sequence, int]] = []
        begins_at = now
        if self._step is not None:
            if now < self._step.ends_at:
                return tokens
            if now - self._step.ends_at < CATCH_UP_S_MAX:
                begins_at = self._step.ends_at
            tokens = self._end(self._step, now)
            self._step = None
        plan = self.batch.plan(now)
        if plan:
            self._step = self._begin(plan, begins_at)
        return tokens

    def wakes_at(self) -> float | None:
        """When something happens by itself next."""
        return self._step.ends_at if self._step is not None else self.batch.next_arrival()

    def stepping(self) -> bool:
        """Whether a step is under way: then new sequences change nothing before it ends."""
        return self._step is not None

    def _begin(self, plan: Plan, begins_at: float) -> _Step:
        sampled: list[tuple[Sequence, int]] = []
        prefill_tokens = decoding = context_tokens = 0
        content_of = self.cache.contents.__getitem__
        for sequence, count in plan:
            if count == 1 and sequence.computed >= sequence.prompt_tokens:
                decoding += 1
                context_tokens += len(sequence.tokens)
            else:
                prefill_tokens += count
            self._compute(sequence, count)
            if sequence.computed == len(sequence.tokens):
                wish = sequence.wish
                may_end = not wish.ignore_eos and sequence.generated + 1 >= wish.min_tokens
                sampled.append((sequence, self._sampler.next_token(map(content_of, sequence.blocks), may_end=may_end)))
        seconds = step_s(self.settings, prefill_tokens, decoding, context_tokens)
        return _Step(begins_at + seconds, seconds, prefill_tokens, decoding, sampled)

    def _compute(self, sequence: Sequence, count: int) -> None:
        """Write the contents of the blocks that hold the next ``count`` tokens; name those that become full."""
        size, tokens, blocks, contents = self.settings.block_size, sequence.tokens, sequence.blocks, self.cache.contents
        end = sequence.computed + count
        for index in range(sequence.computed // size, (end - 1) // size + 1):
            start = index * size
            held = tokens[start : min(start + size, end)]
            previous = contents[blocks[index - 1]] if index else ROOT_CONTENT
            contents[blocks[index]] = block_content(previous, held)
            if len(held) == size:
                self._name(sequence, index)
        sequence.computed = end

    def _name(self, sequence: Sequence, index: int) -> None:
        hashes = sequence.hashes
        if index == len(hashes):
            self._hasher.extend(hashes, sequence.tokens, sequence.wish.cache_salt)
        self.cache.name(sequence.blocks[index], hashes[index], hashes[index - 1] if index else None)

    def _end(self, step: _Step, now: float) -> list[tuple[Sequence, int]]:
        self.measures.step_finished(step.prefill_tokens, step.decoding, step.took_s)
        wanted = [pair for pair in step.sampled if not pair[0].finish_reason]
        self.measures.generated_tokens += len(wanted)
        for sequence, token in wanted:
            sequence.tokens.append(token)
            if sequence.account.first_token_at is None:
                sequence.account.first_token_at = now
                self.measures.prompt_finished(sequence)
            sequence.finish_reason = sequence.finish_with(token, self._eos)
            if sequence.finish_reason:
                self._finish(sequence)
        return wanted

    def _finish(self, sequence: Sequence) -> None:
        transfer = sequence.wish.transfer
        if transfer is not None and transfer.do_remote_decode:
            sequence.account.offer = self._offer(sequence)
        self.batch.remove(sequence)

    def _offer(self, sequence: Sequence) -> handoff.Handoff:
        settings = self.settings
        # The reader computes at least the last prompt token itself, so a last block that is just full is no use to it.
        blocks = sequence.blocks[: (sequence.prompt_tokens - 1) // settings.block_size]
        contents = [self.cache.contents[block] for block in blocks]
        packed = handoff.pack_blocks(sequence.hashes, contents)
        return handoff.offer(settings.engine_id, settings.block_size, settings.sim_kv_bytes_per_token, packed)
