"""An oracle: greedy placement with perfect knowledge of the present.

At each arrival it reads the simulator's true state without delay: every engine's queue, the remaining work of each
running request (exact output lengths, also the new request's), true cache contents, and link usage. For each worker,
with and without fetching the prefix from the worker that holds most of it, it simulates the engine's steps until the
first token. It chooses the earliest first token. Later time (own decoding, time added to others) has the weight
``LATER_WEIGHT``, as a tie-break.

It does not know future arrivals, so it neither reserves nor replicates: it is a reference, not a bound. On a fleet of
workers with role ``both`` it places each request on one worker.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.request.facts import Mode
from shared.contracts.failures import Reason
from shared.contracts.kv_exchange import KvSource
from shared.contracts.workers import Role

if TYPE_CHECKING:
    from bench.policies.world import PolicyWorld
    from replay.engine import Job
    from replay.profile import Profile
    from replay.simworker import SimWorker


LATER_WEIGHT = 0.02
"""Cost of a second after the first token, relative to a second before it."""


class Forecast(NamedTuple):
    """Seconds from now."""

    ttft_s: float
    total_s: float
    """Until the completion ends, plus the time it adds to other requests."""


class Prompt:
    """A prompt to compute: the new one, or one ahead of it in the queue."""

    __slots__ = ("blocks", "computed", "last", "ready_at", "tokens")

    def __init__(self, tokens: int, computed: int, last: int, blocks: int, ready_at: float = 0.0) -> None:
        self.tokens = tokens
        self.computed = computed
        self.last = last
        """Total tokens at the end."""
        self.blocks = blocks
        """Blocks needed for admission."""
        self.ready_at = ready_at
        """When its fetched KV has arrived."""


def forecast(worker: SimWorker, size: tuple[int, int], prefix: tuple[int, int], now: float) -> Forecast:
    """``size``: prompt and completion tokens; ``prefix``: cached tokens without and with a fetch."""
    projection = Projection(worker, now)
    profile = worker.engine.profile
    (tokens, out), (cached, available) = size, prefix
    ready_at = 0.0
    if available > cached:
        ready_at = max(now + profile.ask_s, worker.link.free_at) + profile.transfer_s(available - cached)
    blocks = -(-tokens // profile.block_tokens) - cached // profile.block_tokens
    new = Prompt(tokens, available, tokens + out, blocks, ready_at)
    projection.prompts.append(new)
    projection.until_computed(new)
    ttft_s = projection.now - now
    step_s = projection.decode_step_s(1, tokens + out / 2)
    left = sorted(
        steps - projection.steps for steps, _tokens, _blocks in projection.decoding if steps > projection.steps
    )
    together = sum(min(out, steps) for steps in left)
    slower_s = step_s - projection.decode_step_s(0, 0.0) if left else 0.0
    meanwhile = len(left) + projection.finished_meanwhile
    return Forecast(ttft_s, ttft_s + out * step_s + together * slower_s + projection.own_s * meanwhile)


class Projection:
    """The projected state of an engine, from its true state."""

    def __init__(self, worker: SimWorker, now: float) -> None:
        engine = worker.engine
        self._profile: Profile = engine.profile
        ends_at = engine.step.ends_at
        busy = ends_at < float("inf")
        self.now = max(now, min(ends_at, engine.step.began_at + engine.step.first_s)) if busy else now
        self.steps = 0
        self.own_s = 0.0
        """Compute time of the new prompt."""
        self.finished_meanwhile = 0
        self.decoding: list[tuple[int, int, int]] = sorted(
            (steps, engine.tokens_of(job), job.holding.blocks) for steps, job in engine.decoders.steps_left()
        )
        """(steps to its end, tokens now, blocks) of each decoding sequence."""
        self._context = engine.decoders.context_tokens
        self._free = engine.pool.free
        self._over = 0
        self._running = deque(self._prompt(job) for job in engine.running if job.since_step < 0)
        self.prompts = deque(map(self._prompt, engine.received_jobs))
        for job in engine.receiving:
            job_prompt = self._prompt(job)
            job_prompt.computed = max(job.computed, min(job.granted or 0, job.tokens - 1))
            job_prompt.ready_at = worker.link.free_at
            self.prompts.append(job_prompt)
        self.prompts.extend(self._waiting(worker, job) for job in engine.waiting)

    def until_computed(self, new: Prompt) -> None:
        """Advance to the new prompt's first token."""
        while True:
            chunks = self._plan()
            if not chunks and not self.decoding_now:
                waits = [prompt.ready_at for prompt in self.prompts if prompt.ready_at > self.now]
                if not waits:
                    return
                self.now = min(waits)
                continue
            step_s = self._step_s(chunks)
            for prompt, count in chunks:
                if prompt is new:
                    self.own_s += self._profile.step_s(count, count * (prompt.computed - count / 2), 0, 0.0)
            alike = 1 if chunks or not self.prompts else self._steps_alike(step_s)
            self.now += alike * step_s
            self._stepped(alike)
            for prompt, _count in chunks:
                if prompt.computed >= prompt.tokens:
                    if prompt is new:
                        return
                    self._running.remove(prompt)
                    self._joins(prompt)

    @property
    def decoding_now(self) -> int:
        """Number of decoding sequences."""
        return len(self.decoding) - self._over

    def decode_step_s(self, joining: int, context_tokens: float) -> float:
        """Step time with ``joining`` more sequences."""
        return self._profile.decode_s(self.decoding_now + joining, self._context + context_tokens)

    def _prompt(self, job: Job) -> Prompt:
        return Prompt(job.tokens, job.computed, job.last_tokens, 0)

    def _waiting(self, worker: SimWorker, job: Job) -> Prompt:
        size = self._profile.block_tokens
        cached = worker.engine.pool.depth(job.chain, job.cacheable(size))
        available = max(cached * size, min(job.granted or 0, job.tokens - 1))
        return Prompt(job.tokens, available, job.last_tokens, -(-job.tokens // size) - cached)

    def _plan(self) -> list[tuple[Prompt, int]]:
        budget = self._profile.max_num_batched_tokens - self.decoding_now
        chunks = []
        for prompt in self._running:
            count = min(prompt.tokens - prompt.computed, budget)
            prompt.computed += count
            budget -= count
            chunks.append((prompt, count))
        passed = 0
        while passed < len(self.prompts) and budget > 0:
            prompt = self.prompts[passed]
            if prompt.ready_at > self.now:
                passed += 1
                continue
            if prompt.blocks > self._free:
                break
            del self.prompts[passed]
            self._free -= prompt.blocks
            count = min(prompt.tokens - prompt.computed, budget)
            prompt.computed += count
            budget -= count
            self._running.append(prompt)
            chunks.append((prompt, count))
        return chunks

    def _step_s(self, chunks: list[tuple[Prompt, int]]) -> float:
        tokens = sum(count for _prompt, count in chunks)
        pairs = sum(count * (prompt.computed - count / 2) for prompt, count in chunks)
        return self._profile.step_s(tokens, pairs, self.decoding_now, self._context)

    def _steps_alike(self, step_s: float) -> int:
        """Steps until the next sequence ends or fetched KV arrives."""
        steps = self.decoding[self._over][0] - self.steps if self.decoding_now else 1
        waits = [prompt.ready_at - self.now for prompt in self.prompts if prompt.ready_at > self.now]
        if waits and step_s > 0:
            steps = min(steps, int(min(waits) / step_s) + 1)
        return max(1, steps)

    def _stepped(self, steps: int) -> None:
        self.steps += steps
        self._context += steps * self.decoding_now
        while self.decoding_now and self.decoding[self._over][0] <= self.steps:
            ends, tokens, blocks = self.decoding[self._over]
            self._over += 1
            self._context -= tokens + ends
            self._free += blocks
            self.finished_meanwhile += 1

    def _joins(self, prompt: Prompt) -> None:
        steps = prompt.last - prompt.tokens - 1
        if steps > 0:
            entry = (
                self.steps + steps,
                prompt.tokens + 1 - self.steps,
                -(-prompt.tokens // self._profile.block_tokens),
            )
            at = self._over
            while at < len(self.decoding) and self.decoding[at] < entry:
                at += 1
            self.decoding.insert(at, entry)
            self._context += prompt.tokens + 1


@dataclass(slots=True)
class Candidate:
    """One way to compute a prompt."""

    worker: SimWorker
    depth: int
    """Blocks cached at the worker."""
    source: SimWorker | None
    source_depth: int
    expected: Forecast

    @property
    def cost_s(self) -> float:
        """Time to the first token plus weighted later time."""
        expected = self.expected
        return expected.ttft_s + LATER_WEIGHT * (expected.total_s - expected.ttft_s)


class Oracle:
    """Implements ``Placer``."""

    def __init__(self, world: PolicyWorld) -> None:
        self._world = world

    def place(self, request: PlacementRequest, now: float) -> Placement | Rejection:
        """Place by the smallest cost."""
        workers = list(self._world.workers.values())
        computing = [worker for worker in workers if worker.record.role is not Role.DECODE]
        decoding = [worker for worker in workers if worker.record.role is Role.DECODE]
        if not computing:
            return Rejection(reason=Reason.NO_WORKER, message="No worker is available.")
        replayed = self._world.counts.replayed
        assert replayed is not None
        tokens_out = 1 if decoding else replayed.request.output_tokens
        choice = min(self._candidates(request, computing, tokens_out, now), key=lambda one: one.cost_s)
        views = self._world.fleet.cluster.workers
        size = self._world.profile.block_tokens
        cached = choice.depth * size
        fetched = max(0, choice.source_depth - choice.depth) * size
        view = views[choice.worker.worker_id]
        decode = view
        if decoding:
            fastest = min(decoding, key=lambda worker: self._decode_s(worker, request, replayed.request.output_tokens))
            decode = views[fastest.worker_id]
        uncached = request.prompt_tokens - cached - fetched
        return Placement(
            mode=Mode.DISAGGREGATED if decoding else Mode.AGGREGATED,
            decode=decode,
            prefill=view if decoding else None,
            cached_tokens=cached,
            fetched_tokens=fetched,
            uncached_tokens=uncached,
            context_tokens=request.prompt_tokens + replayed.request.output_tokens,
            sources=() if choice.source is None else (source_of(choice),),
            streamed=bool(decoding) and uncached >= self._world.fleet.policy.stream_tokens_min,
        )

    def _candidates(
        self, request: PlacementRequest, workers: list[SimWorker], tokens_out: int, now: float
    ) -> list[Candidate]:
        size = self._world.profile.block_tokens
        limit = (request.prompt_tokens - 1) // size
        depths = [worker.engine.pool.depth(request.hashes, limit) for worker in workers]
        deepest = max(range(len(workers)), key=depths.__getitem__)
        choices = []
        for worker, depth in zip(workers, depths, strict=True):
            options: list[tuple[SimWorker | None, int]] = [(None, depth)]
            if depths[deepest] > depth:
                options.append((workers[deepest], depths[deepest]))
            for source, has in options:
                expected = forecast(worker, (request.prompt_tokens, tokens_out), (depth * size, has * size), now)
                choices.append(Candidate(worker, depth, source, has, expected))
        return choices

    def _decode_s(self, worker: SimWorker, request: PlacementRequest, tokens_out: int) -> float:
        """Decode time there plus time added to others, with a penalty for missing KV blocks."""
        engine = worker.engine
        profile = engine.profile
        pending = list(engine.waiting) + list(engine.receiving) + list(engine.received_jobs)
        decoding = len(engine.decoders) + len(pending)
        context = engine.decoders.context_tokens + sum(job.tokens for job in pending)
        step_s = profile.decode_s(decoding + 1, context + request.prompt_tokens + tokens_out / 2)
        added_s = profile.decode_s(decoding + 1, context + request.prompt_tokens) - profile.decode_s(decoding, context)
        blocks = -(-(request.prompt_tokens + tokens_out) // profile.block_tokens)
        wanted = blocks + sum(-(-job.tokens // profile.block_tokens) for job in engine.waiting)
        crowded = max(0.0, wanted - engine.pool.free)
        reading_s = max(0.0, worker.link.free_at - self._world.now)
        return tokens_out * (step_s + decoding * added_s) + reading_s + crowded * step_s * 100


def source_of(choice: Candidate) -> KvSource:
    """The source of a candidate that fetches."""
    assert choice.source is not None
    record = choice.source.record
    return KvSource(worker_id=record.worker_id, epoch=record.epoch, first=choice.depth, end=choice.source_depth)
