"""A simulated engine in virtual time: the law of ``services.worker.engines.simulated.core``, many decode steps at once.

As there: running sequences first, in the order in which they came in, then those that wait, first come, first served;
long prompts in chunks of what the decoding ones leave of a step; when no block is left the youngest running sequence
gives up its own and is computed again later. What differs is the bookkeeping. While nobody computes a prompt, all
steps until the next finish or the next full block are alike but for the growing context, so their total is known in
closed form; whatever comes meanwhile takes effect at the end of the step it falls into.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

from replay.block_pool import BlockPool
from replay.decoders import Decoders
from replay.job import Job
from replay.profile import Profile
from replay.speeds import Speeds
from replay.step import Step


class Listener(Protocol):
    """Who is told what happens. An engine's jobs are never given back to it from within these calls."""

    def asks(self, engine: Engine, job: Job, now: float) -> None:
        """The job wants KV from elsewhere: answer with ``granted``, then ``poke``."""

    def receives(self, engine: Engine, job: Job, now: float) -> None:
        """Room is made: let the reads begin, then ``received``."""

    def computed(self, engine: Engine, job: Job, now: float) -> None:
        """A chunk of its prompt is there."""

    def first_token(self, engine: Engine, job: Job, now: float) -> None:
        """Its first token is out."""

    def finished(self, engine: Engine, job: Job, now: float) -> None:
        """All of its tokens are out. Its blocks are still its own."""


class Engine:
    """``wakes_at`` is when to call ``wake``; anything else may change it."""

    def __init__(self, profile: Profile, listener: Listener) -> None:
        self.profile = profile
        self.pool = BlockPool(profile.kv_blocks)
        self.waiting: deque[Job] = deque()
        self.receiving: set[Job] = set()
        """They hold room for all of their prompt, and some of it is being read."""
        self.received_jobs: deque[Job] = deque()
        self.running: dict[Job, None] = {}
        """In the order of admission. All but the last decode, or it does as well."""
        self.decoders = Decoders(profile)
        self.waiting_tokens = 0
        """Prompt tokens accepted and not yet computed."""
        self.speeds = Speeds()
        self.step = Step()
        self._listener = listener
        self._admitted = 0

    @property
    def wakes_at(self) -> float:
        """Infinity when nothing happens by itself."""
        return self.step.ends_at

    @property
    def queued(self) -> int:
        """Sequences that compute nothing yet."""
        return len(self.waiting) + len(self.receiving) + len(self.received_jobs)

    def add(self, job: Job, now: float) -> None:
        """At the end of the queue."""
        self.waiting.append(job)
        self.waiting_tokens += job.prompt_tokens
        self.poke(now)

    def received(self, job: Job, tokens: int, now: float) -> None:
        """All that will come of its prompt has come: the first ``tokens`` are there."""
        self.receiving.discard(job)
        job.received_tokens = max(0, tokens - job.computed)
        job.received_s = now - (job.scheduled_at or now)
        self._set_computed(job, max(job.computed, tokens))
        self._name_full(job, job.computed)
        self.received_jobs.append(job)
        self.poke(now)

    def poke(self, now: float) -> None:
        """Something may be possible that was not: it is tried when the present step ends."""
        step = self.step
        if step.ends_at == math.inf:
            self._begin(now)
        elif step.count > 1:
            step.cut(now)

    def wake(self, now: float) -> None:
        """The present steps are over; begin the next."""
        self._end(now)
        self._begin(now)

    def tokens_of(self, job: Job) -> int:
        """Its length after the steps that have ended."""
        return job.tokens + (self.decoders.steps - job.since_step if job.since_step >= 0 else 0)

    def _end(self, now: float) -> None:
        step, decoders = self.step, self.decoders
        self.speeds.stepped(step)
        decoders.stepped(step.count)
        chunks, step.chunks = step.chunks, []
        step.ends_at = math.inf
        for job, _count in chunks:
            self._name_full(job, job.computed)
        over = decoders.finished()
        for job in over:
            self._finish(job, now)
        for job, _count in chunks:
            if job.computed == job.tokens:
                self._sampled(job, now)
            else:
                self._listener.computed(self, job, now)

    def _sampled(self, job: Job, now: float) -> None:
        job.tokens += 1
        if job.first_token_at is None:
            job.first_token_at = now
            self._listener.computed(self, job, now)
            self._listener.first_token(self, job, now)
        if job.tokens >= job.last_tokens:
            self._finish(job, now)
        else:
            self.decoders.join(job)

    def _finish(self, job: Job, now: float) -> None:
        tokens = self.tokens_of(job)
        if job.since_step >= 0:
            self.decoders.leave(job)
        job.tokens = tokens
        self._name_full(job, tokens - 1)
        job.finished_at = now
        del self.running[job]
        self._listener.finished(self, job, now)
        self.pool.release(job.holding)

    def _begin(self, now: float) -> None:
        budget = self.profile.max_num_batched_tokens
        chunks: list[tuple[Job, int]] = []
        preempted = self._go_on(chunks, budget)
        budget -= len(self.decoders) + sum(count for _job, count in chunks)
        while self.received_jobs and budget > 0 and len(self.running) < self.profile.max_num_seqs:
            budget -= self._run(self.received_jobs.popleft(), chunks, budget, now)
        if not preempted:
            self._admit(chunks, budget, now)
        if chunks or self.decoders:
            self.step.begin(now, chunks, self.decoders, self.profile)
            if preempted:
                self.step.cut(now)
        elif preempted:
            self._begin(now)

    def _go_on(self, chunks: list[tuple[Job, int]], budget: int) -> bool:
        """Room for those that run; answers whether somebody had to give up room."""
        preempted = False
        for job in self.decoders.crossing():
            if job.since_step < 0:
                continue  # Preempted by one before it.
            self._name_full(job, self.tokens_of(job) - 1)
            while not self.pool.take(1):
                preempted = True
                if self._preempt_youngest() is job:
                    break
            else:
                job.holding.nameless += 1
        budget -= len(self.decoders)
        last = next(reversed(self.running), None)
        if last is not None and last.since_step < 0 and budget > 0:
            count = min(last.tokens - last.computed, budget)
            if self._extend(last, last.computed + count):
                self._set_computed(last, last.computed + count)
                chunks.append((last, count))
            else:
                preempted = True
                self._preempt_youngest()
        return preempted

    def _preempt_youngest(self) -> Job:
        victim = next(reversed(self.running))
        del self.running[victim]
        tokens = self.tokens_of(victim)
        if victim.since_step >= 0:
            self.decoders.leave(victim)
            self._name_full(victim, tokens - 1)
        victim.tokens = tokens
        self._give_up(victim)
        victim.order = 0
        victim.preemptions += 1
        self.waiting.appendleft(victim)
        return victim

    def _admit(self, chunks: list[tuple[Job, int]], budget: int, now: float) -> None:
        asking = 0
        while asking < len(self.waiting) and budget > 0 and len(self.running) + asking < self.profile.max_num_seqs:
            job = self.waiting[asking]
            if not self._hold_prefix(job):
                break
            if job.fetches and job.granted is None:
                self._give_up(job)
                asking += 1
                if not job.asked:
                    job.asked = True
                    self._listener.asks(self, job, now)
                continue
            del self.waiting[asking]
            if job.fetches and job.granted is not None and job.granted > job.computed:
                self._receive(job, now)
            else:
                budget -= self._run(job, chunks, budget, now)

    def _receive(self, job: Job, now: float) -> None:
        if not self._extend(job, job.tokens):
            raise AssertionError("a job was admitted without room for its tokens")
        self._schedule(job, now)
        job.fetches = False
        self.receiving.add(job)
        self._listener.receives(self, job, now)

    def _run(self, job: Job, chunks: list[tuple[Job, int]], budget: int, now: float) -> int:
        count = min(job.tokens - job.computed, budget)
        if not self._extend(job, job.computed + count):
            raise AssertionError("a job was admitted without room for its tokens")
        self._schedule(job, now)
        self._admitted += 1
        job.order = self._admitted
        self._set_computed(job, job.computed + count)
        self.running[job] = None
        chunks.append((job, count))
        return count

    def _schedule(self, job: Job, now: float) -> None:
        if job.scheduled_at is None:
            job.scheduled_at = now
            job.cached_tokens = min(job.computed, job.prompt_tokens - 1)

    def _hold_prefix(self, job: Job) -> bool:
        """Holds what is cached of its tokens, if the rest of them has room as well."""
        size, pool = self.profile.block_tokens, self.pool
        limit = job.cacheable(size)
        depth = pool.depth(job.chain, limit)
        names = list(job.chain[:depth])
        while depth == len(names) >= len(job.chain) and len(names) < limit and pool.has(job.name_of(depth)):
            names.append(job.name_of(depth))  # Its own, from before a preemption.
            depth += 1
        if -(-job.tokens // size) - depth > pool.room_beside(names):
            return False
        pool.hold(names)
        job.holding.named = names
        job.filled = depth
        self._set_computed(job, depth * size)
        return True

    def _extend(self, job: Job, tokens: int) -> bool:
        missing = -(-tokens // self.profile.block_tokens) - job.holding.blocks
        if missing > 0:
            if not self.pool.take(missing):
                return False
            job.holding.nameless += missing
        return True

    def _name_full(self, job: Job, computed: int) -> None:
        full = computed // self.profile.block_tokens
        for index in range(job.filled, full):
            self.pool.name(job.holding, job.name_of(index), job.name_of(index - 1) if index else None)
        job.filled = max(job.filled, full)

    def _give_up(self, job: Job) -> None:
        self.pool.release(job.holding)
        job.filled = 0
        self._set_computed(job, 0)

    def _set_computed(self, job: Job, computed: int) -> None:
        prompt = job.prompt_tokens
        self.waiting_tokens += max(0, prompt - computed) - max(0, prompt - job.computed)
        job.computed = computed
