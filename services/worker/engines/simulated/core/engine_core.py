"""The core of the simulated engine: computes tokens of sequences in virtual steps, on the caller's clock.

core.add(owner, tokens, params, now)
for sequence, token in core.advance(now): ...     # tokens of the step that has ended; the next step begins
core.wakes_at()                                   # when to call advance again; None: after the next add
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from zlib import crc32

from connector.messages import EngineCall, EngineNotification, Results
from services.worker.engines.simulated.core.batch import ABORT, Batch, Plan, RequestParams, Sequence, SequenceStats
from services.worker.engines.simulated.core.block_cache import BlockCache
from services.worker.engines.simulated.core.exchange import Exchange
from services.worker.engines.simulated.core.settings import SimulationSettings
from services.worker.engines.simulated.core.tokens import BlockHasher, TokenSampler, block_content, root_content
from shared.contracts.load import StepTotals
from shared.engine_speed.steps import StepTotalsCounter

CATCH_UP_S_MAX = 0.02
"""If ``advance`` is called late by less than this, the next step counts as begun on time, so that the engine keeps its
speed.
"""
SPEED_MEMORY = 0.9
"""Weight of the old value when a step adds a sample of a speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTokens:
    """The part of the model's vocabulary that the simulation needs."""

    size: int
    """Ids are below this."""
    sayable: list[int]
    """Ids that the model may generate."""
    eos: int | None = None


@dataclass(slots=True)
class _Step:
    ends_at: float
    totals: StepTotals
    """Totals of this step alone."""
    sampled: list[tuple[Sequence, int]]
    filled: list[tuple[Sequence, int]]
    """Sequences, with indices of their blocks that become full at the end of the step."""


class EngineCore:
    """One simulated engine. Not thread-safe; no call blocks."""

    def __init__(self, settings: SimulationSettings, model: ModelTokens) -> None:
        self.settings = settings
        self.cache = BlockCache(
            settings.kv_blocks, prefix_caching=settings.prefix_caching, others=settings.other_groups
        )
        self.exchange = Exchange(settings, self.cache, lambda: self._now)
        self.batch = Batch(settings, self.cache, self.exchange.reader)
        self.measures = Measures()
        self._timing = replace(settings, noise_seed=settings.noise_seed or crc32(settings.worker_id.encode()))
        self._hasher = BlockHasher(settings.block_size, model.size)
        self._sampler = TokenSampler(model.sayable, model.eos)
        self._eos = model.eos
        self._size = model.size
        self._step: _Step | None = None
        self._steps = 0
        self._now = 0.0
        self._numbers = count(1)

    def add(self, owner: Any, tokens: list[int], params: RequestParams, now: float) -> Sequence:
        """Queue a prompt; the sequence takes ownership of ``tokens``. Raises ValueError if it does not fit."""
        tokens_max = self.settings.max_model_len - len(tokens)
        if not tokens or not 1 <= params.max_tokens <= tokens_max:
            raise ValueError(
                f"{len(tokens)} prompt tokens and {params.max_tokens} output tokens do not fit this engine"
            )
        sequence = Sequence(
            request_id=str(next(self._numbers)),
            owner=owner,
            prompt_tokens=len(tokens),
            tokens=tokens,
            params=params,
            stats=SequenceStats(arrived_at=now),
        )
        self._hasher.extend(sequence.hashes, tokens, params.cache_salt, params.adapter)
        self.batch.add(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Abort in any state. Its blocks become free at once, or when no read writes into them any more.

        Does nothing for a finished sequence.
        """
        if not sequence.finish_reason:
            sequence.finish_reason = ABORT
            self.exchange.finished(sequence, offers=False)
            self.batch.remove(sequence)
            self.batch.settle(self._now)

    def call(self, call: EngineCall, now: float) -> EngineNotification:
        """Forward a call to the exchange. Its effects on sequences follow in the next ``advance``."""
        self._now = now
        return self.exchange.call(call)

    def results(self, results: Results, now: float) -> None:
        """Apply the mover's results of ``exchange.take_orders()``. ``advance`` uses them."""
        self._now = now
        self.exchange.results(results)

    def advance(self, now: float) -> list[tuple[Sequence, int | None]]:
        """End the current step if its time is over, and begin the next.

        Returns the new tokens of the ended step. A refused sequence has None as its token; see ``finish_reason``.
        """
        self._now = now
        tokens: list[tuple[Sequence, int | None]] = []
        begins_at = now
        if self._step is not None and now >= self._step.ends_at:
            if now - self._step.ends_at < CATCH_UP_S_MAX:
                begins_at = self._step.ends_at
            tokens += self._end(self._step, now)
            self._step = None
        self.exchange.poll()
        tokens += self._begin_answers(now)
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
        """When ``advance`` must be called next; None: after the next change."""
        times = (self.exchange.wakes_at(), None if self._step is None else self._step.ends_at)
        return min((at for at in times if at is not None), default=None)

    def waiting_tokens(self) -> int:
        """Prompt tokens accepted and not yet computed, including those of the current step."""
        under_way = self._step.totals.prefill_tokens if self._step is not None else 0
        return under_way + sum([sequence.prompt_tokens_left for sequence in self.batch.unfinished()])

    def stepping(self) -> bool:
        """Whether a step is in progress. New sequences have no effect before it ends."""
        return self._step is not None

    def _plan(self, now: float) -> Plan:
        plan = self.batch.plan(now)
        if not plan and self.batch.settle(now):  # A planned fetch could not be started.
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
                params = sequence.params
                may_end = not params.ignore_eos and sequence.generated + 1 >= params.min_tokens
                sampled.append((sequence, self._sampler.next_token(map(content_of, sequence.blocks), may_end=may_end)))
        seconds = self._timing.step_s(prefill_tokens, pairs, decoding, context_tokens)
        seconds *= self._timing.noise_of(self._steps)
        self._steps += 1
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
        """Write the contents of the blocks that hold the next tokens; returns the blocks that become full."""
        size, blocks, contents = self.settings.block_size, sequence.blocks, self.cache.contents
        end = sequence.computed + tokens
        filled = []
        for index in range(sequence.computed // size, (end - 1) // size + 1):
            start = index * size
            held = sequence.tokens[start : min(start + size, end)]
            previous = contents[blocks[index - 1]] if index else root_content(sequence.params.adapter)
            previous ^= sequence.wrong
            contents[blocks[index]] = block_content(previous, held)
            if len(held) == size:
                filled.append((sequence, index))
        sequence.computed = end
        return filled

    def _name(self, sequence: Sequence, index: int) -> None:
        hashes = sequence.hashes
        if index == len(hashes):
            self._hasher.extend(hashes, sequence.tokens, sequence.params.cache_salt, sequence.params.adapter)
        self.cache.name(sequence.blocks[index], hashes[index], hashes[index - 1] if index else None)
        self.batch.keep(sequence, index + 1)

    def _end(self, step: _Step, now: float) -> list[tuple[Sequence, int]]:
        self.measures.step_finished(step.totals)
        # A block gets its name only now: others find it by its name, and must not read it half computed.
        for sequence, index in step.filled:
            if not sequence.finish_reason:
                self._name(sequence, index)
        wanted = [pair for pair in step.sampled if not pair[0].finish_reason]
        self.measures.generated_tokens += len(wanted)
        for sequence, token in wanted:
            sequence.tokens.append(token)
            if sequence.stats.first_token_at is None:
                sequence.stats.first_token_at = now
            if not sequence.stats.is_prompt_computed:
                sequence.stats.is_prompt_computed = True
                sequence.stats.transfer_report = self.exchange.transfer_report(sequence)
                self.measures.prompt_finished(sequence)
            sequence.finish_reason = sequence.params.ending(token, sequence.generated, self._eos)
            if sequence.finish_reason:
                self.exchange.finished(sequence, offers=sequence.params.order.offer)
                self.batch.remove(sequence)
        return wanted

    def _begin_answers(self, now: float) -> list[tuple[Sequence, int]]:
        """The first tokens that came with grants and offers, for sequences that wait for their KV."""
        begun = []
        for request_id, first in self.exchange.reader.take_first_tokens().items():
            sequence, token = self.batch.receiving.get(request_id), first.token_id
            if sequence is None or self.exchange.basis_of(sequence) != first.basis or not 0 <= token < self._size:
                continue
            params = sequence.params
            if params.order.cache_hit_threshold or params.ending(token, 1, self._eos):
                continue
            if self.batch.begin(sequence, token):
                self.exchange.reader.began(request_id, sequence.prompt_tokens)
                sequence.stats.first_token_at = now
                sequence.stats.transfer_report = self.exchange.reader.transfer_report(request_id)
                self.measures.generated_tokens += 1
                begun.append((sequence, token))
        return begun


@dataclass(slots=True)
class Measures:
    """Totals since the engine's start, and recent speeds."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    received_tokens: int = 0
    received_bytes: int = 0
    received_s: float = 0.0
    generated_tokens: int = 0
    decode_s_per_token: float = 0.0
    steps: StepTotalsCounter = field(default_factory=StepTotalsCounter)

    def prompt_finished(self, sequence: Sequence) -> None:
        """Count the prompt of ``sequence``, which has its first token."""
        stats = sequence.stats
        self.prompt_tokens += sequence.prompt_tokens
        self.cached_tokens += stats.cached_tokens
        self.received_tokens += stats.received_tokens
        self.received_bytes += stats.received_bytes
        self.received_s += stats.received_s
        self.computed_tokens += sequence.prompt_tokens - stats.cached_tokens - stats.received_tokens

    def step_finished(self, step: StepTotals) -> None:
        self.steps.add(step)
        if step.decode_steps:
            self.decode_s_per_token = _blend(self.decode_s_per_token, step.seconds)


def _blend(old: float, sample: float) -> float:
    return SPEED_MEMORY * old + (1 - SPEED_MEMORY) * sample if old else sample
