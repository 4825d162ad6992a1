"""The simulated engine itself: sequences go in, tokens come out, and the caller's clock decides when.

core.add(owner, tokens, wish, now)
for sequence, token in core.advance(now): ...     # the tokens of a step that has ended; then the next one begins
core.wakes_at()                                   # when to call advance again; None: only after the next add
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

from connector.messages import EngineCall, EngineNotification, Results
from services.worker.engines.simulated.core.batch import Batch, Plan
from services.worker.engines.simulated.core.block_cache import BlockCache
from services.worker.engines.simulated.core.exchange import Exchange
from services.worker.engines.simulated.core.measures import Measures
from services.worker.engines.simulated.core.sequence import ABORT, Account, Sequence, Wish
from services.worker.engines.simulated.core.settings import SimulationSettings
from services.worker.engines.simulated.core.tokens import ROOT_CONTENT, BlockHasher, TokenSampler, block_content
from shared.contracts.load import StepTotals

CATCH_UP_S_MAX = 0.02
"""A caller that is late by less does not slow the engine down: the next step counts as begun on time."""


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
    totals: StepTotals
    """Of this step alone."""
    sampled: list[tuple[Sequence, int]]
    filled: list[tuple[Sequence, int]]
    """Sequences and indices of their blocks that are full when the step has ended."""


class EngineCore:
    """One simulated engine. Not thread-safe; no call waits."""

    def __init__(self, settings: SimulationSettings, model: ModelTokens) -> None:
        self.settings = settings
        self.cache = BlockCache(settings.kv_blocks, prefix_caching=settings.prefix_caching)
        self.exchange = Exchange(settings, self.cache, lambda: self._now)
        self.batch = Batch(settings, self.cache, self.exchange.reader)
        self.measures = Measures()
        self._timing = settings.step_timing()
        self._hasher = BlockHasher(settings.block_size, model.size)
        self._sampler = TokenSampler(model.sayable, model.eos)
        self._eos = model.eos
        self._step: _Step | None = None
        self._now = 0.0
        self._numbers = count(1)

    def add(self, owner: Any, tokens: list[int], wish: Wish, now: float) -> Sequence:
        """Queue a prompt; the list becomes the sequence's own. Raises ValueError for one that cannot be served."""
        room = self.settings.max_model_len - len(tokens)
        if not tokens or not 1 <= wish.max_tokens <= room:
            raise ValueError(f"{len(tokens)} prompt tokens and {wish.max_tokens} more do not fit this engine")
        sequence = Sequence(
            request_id=str(next(self._numbers)),
            owner=owner,
            prompt_tokens=len(tokens),
            tokens=tokens,
            wish=wish,
            account=Account(arrived_at=now),
        )
        self._hasher.extend(sequence.hashes, tokens, wish.cache_salt)
        self.batch.add(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Abort in any state. Its blocks are free at once, or when no read writes into them any more.

        Harmless for one that has finished.
        """
        if not sequence.finish_reason:
            sequence.finish_reason = ABORT
            self.exchange.finished(sequence, offers=False)
            self.batch.remove(sequence)
            self.batch.settle(self._now)

    def call(self, call: EngineCall, now: float) -> EngineNotification:
        """A call to the exchange; the engine goes on with the next ``advance``."""
        self._now = now
        return self.exchange.call(call)

    def results(self, results: Results, now: float) -> None:
        """What the mover has done of ``exchange.take_orders()``; ``advance`` goes on with it."""
        self._now = now
        self.exchange.results(results)

    def advance(self, now: float) -> list[tuple[Sequence, int | None]]:
        """End the step that is over, begin the next.

        Returns the ended one's new tokens, and sequences that were refused without one; see ``finish_reason``.
        """
        self._now = now
        tokens: list[tuple[Sequence, int | None]] = []
        begins_at = now
        if self._step is not None and now >= self._step.ends_at:
            if now - self._step.ends_at < CATCH_UP_S_MAX:
                begins_at = self._step.ends_at
            tokens += self._end(self._step, now)
            self._step = None
        self.exchange.look()
        self.batch.settle(now)
        if self._step is None and (plan := self._plan(now)):
            self._step = self._begin(plan, begins_at)
        self.exchange.send()
        for sequence in self.batch.refused:
            self.exchange.finished(sequence, offers=False)
            tokens.append((sequence, None))
        self.batch.refused.clear()
        return tokens

    def wakes_at(self) -> float | None:
        """When something happens by itself next."""
        times = (self.exchange.wakes_at(), None if self._step is None else self._step.ends_at)
        return min((at for at in times if at is not None), default=None)

    def waiting_tokens(self) -> int:
        """Prompt tokens accepted and not yet computed; those of the step that is under way are not."""
        under_way = self._step.totals.prefill_tokens if self._step is not None else 0
        return under_way + sum([sequence.prompt_tokens_left for sequence in self.batch.everyone()])

    def stepping(self) -> bool:
        """Whether a step is under way: then new sequences change nothing before it ends."""
        return self._step is not None

    def _plan(self, now: float) -> Plan:
        plan = self.batch.plan(now)
        if not plan and self.batch.settle(now):  # What was to be fetched could not even be begun.
            plan = self.batch.plan(now)
        return plan

    def _begin(self, plan: Plan, begins_at: float) -> _Step:
        sampled: list[tuple[Sequence, int]] = []
        filled: list[tuple[Sequence, int]] = []
        prefill_tokens = decoding = context_tokens = 0
        pairs = 0.0
        content_of = self.cache.contents.__getitem__
        for sequence, tokens in plan:
            if tokens == 1 and sequence.computed >= sequence.prompt_tokens:
                decoding += 1
                context_tokens += len(sequence.tokens)
            else:
                prefill_tokens += tokens
                pairs += tokens * (sequence.computed + tokens / 2)
            if sequence.computed < sequence.prompt_tokens:
                self.exchange.scheduled(sequence)
            filled += self._compute(sequence, tokens)
            if sequence.computed == len(sequence.tokens):
                wish = sequence.wish
                may_end = not wish.ignore_eos and sequence.generated + 1 >= wish.min_tokens
                sampled.append((sequence, self._sampler.next_token(map(content_of, sequence.blocks), may_end=may_end)))
        seconds = self._timing.step_s(prefill_tokens, pairs, decoding, context_tokens)
        totals = StepTotals(
            seconds=seconds,
            prefill_steps=int(prefill_tokens > 0),
            prefill_tokens=prefill_tokens,
            prefill_pairs=pairs,
            decode_steps=int(decoding > 0),
            decode_requests=decoding,
            decode_context_tokens=context_tokens,
        )
        return _Step(begins_at + seconds, totals, sampled, filled)

    def _compute(self, sequence: Sequence, tokens: int) -> list[tuple[Sequence, int]]:
        """Write the contents of the blocks that hold the next tokens; answers those that become full."""
        size, blocks, contents = self.settings.block_size, sequence.blocks, self.cache.contents
        end = sequence.computed + tokens
        filled = []
        for index in range(sequence.computed // size, (end - 1) // size + 1):
            start = index * size
            held = sequence.tokens[start : min(start + size, end)]
            previous = contents[blocks[index - 1]] if index else ROOT_CONTENT
            contents[blocks[index]] = block_content(previous, held)
            if len(held) == size:
                filled.append((sequence, index))
        sequence.computed = end
        return filled

    def _name(self, sequence: Sequence, index: int) -> None:
        hashes = sequence.hashes
        if index == len(hashes):
            self._hasher.extend(hashes, sequence.tokens, sequence.wish.cache_salt)
        self.cache.name(sequence.blocks[index], hashes[index], hashes[index - 1] if index else None)

    def _end(self, step: _Step, now: float) -> list[tuple[Sequence, int]]:
        self.measures.step_finished(step.totals)
        # Not before the step has ended: a named block can be found, and then read or leased half computed.
        for sequence, index in step.filled:
            if not sequence.finish_reason:
                self._name(sequence, index)
        wanted = [pair for pair in step.sampled if not pair[0].finish_reason]
        self.measures.generated_tokens += len(wanted)
        for sequence, token in wanted:
            sequence.tokens.append(token)
            if sequence.account.first_token_at is None:
                sequence.account.first_token_at = now
                sequence.account.transfer_report = self.exchange.transfer_report(sequence)
                self.measures.prompt_finished(sequence)
            sequence.finish_reason = sequence.wish.ending(token, sequence.generated, self._eos)
            if sequence.finish_reason:
                self.exchange.finished(sequence, offers=sequence.wish.order.offer)
                self.batch.remove(sequence)
        return wanted
