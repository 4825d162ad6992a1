"""A simulated engine in virtual time that advances many decode steps at once.

It schedules like ``services.worker.engines.simulated.core``: running sequences first, in order of admission, then
waiting ones, first come, first served. Long prompts are computed in chunks that fill the rest of a step's token budget.
Without free blocks the youngest running sequence is preempted and computed again later.

The bookkeeping differs. While no prompt is computed, the steps until the next finish, the next full block or the next
knot of the step-time model differ only in the growing context, so their total duration has a closed form. An event in
between takes effect at the end of the current step.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Protocol

from replay.block_pool import BlockPool, Holding, HostTier
from replay.profile import Profile, Speeds

PRIVATE = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(slots=True, eq=False)
class Job:
    """``tokens`` are the prompt's and then the generated ones; KV exists for the first ``computed`` of them.

    While it decodes, both are as of ``since_step``; see ``Engine.tokens_of``.
    """

    number: int
    """A number unique among all jobs."""
    chain: tuple[int, ...]
    """Names of the prompt's full blocks, and of those that its answer fills, if they are known."""
    prompt_tokens: int
    output_tokens: int
    owner: Any = None
    """A value that only the caller sets and reads."""
    fetches: bool = False
    """Whether the job fetches KV from other workers before it is computed."""
    granted: int | None = None
    """Prompt tokens, from the start, that are cached here or granted by others; None: not requested yet."""
    has_requested: bool = False
    tokens: int = 0
    computed: int = 0
    filled: int = 0
    """Full blocks that were offered to the prefix cache."""
    holding: Holding = field(default_factory=Holding)
    order: int = 0
    """Order of admission to the batch; 0: not in it."""
    since_step: int = -1
    """Step in which the job began to decode; -1: not decoding."""
    cached_tokens: int = 0
    """Prompt tokens cached here when it was first scheduled."""
    loaded_tokens: int = 0
    """Prompt tokens that host memory held when it was first scheduled."""
    received_tokens: int = 0
    received_kept: int = 0
    """Blocks of windows or states that came with these tokens."""
    received_s: float = 0.0
    """Seconds from the reservation of blocks to their arrival."""
    scheduled_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.tokens = self.tokens or self.prompt_tokens

    @property
    def last_tokens(self) -> int:
        """Total length at the end."""
        return self.prompt_tokens + self.output_tokens

    def name_of(self, index: int) -> int:
        """Content name of a block; blocks beyond ``chain`` are unique."""
        if index < len(self.chain):
            return self.chain[index]
        return ((self.number << 12 | index) * PRIVATE) & _MASK

    def cacheable(self, block_tokens: int) -> int:
        """Blocks that may come from a cache. The last token is always computed, since the next one follows from it."""
        return (self.tokens - 1) // block_tokens


class Decoders:
    """Heaps of the next finishes and the next full blocks."""

    def __init__(self, profile: Profile) -> None:
        self.steps = 0
        """Completed steps."""
        self.context_tokens = 0
        """Tokens of all decoding sequences."""
        self._block_tokens = profile.block_tokens
        self._count = 0
        self._finishes: list[tuple[int, int, int, Job]] = []
        self._crossings: list[tuple[int, int, int, Job]] = []
        """Steps after which a sequence needs another block.

        Entries of both heaps: (steps, admission order, step of joining, job).
        """

    def __len__(self) -> int:
        return self._count

    @property
    def steps_alike(self) -> int:
        """Steps until the next finish or the next block."""
        heaps = (self._finishes, self._crossings)
        for heap in heaps:
            while heap and heap[0][3].since_step != heap[0][2]:
                heappop(heap)
        return max(1, min((heap[0][0] for heap in heaps if heap), default=self.steps + 1) - self.steps)

    def join(self, job: Job) -> None:
        """Add a job whose newest token was sampled in the step that has just ended."""
        job.since_step = self.steps
        self._count += 1
        self.context_tokens += job.tokens
        heappush(self._finishes, (self.steps + job.last_tokens - job.tokens, job.order, self.steps, job))
        heappush(self._crossings, (self.steps + (1 - job.tokens) % self._block_tokens, job.order, self.steps, job))

    def leave(self, job: Job) -> None:
        """Remove a finished or preempted job."""
        self._count -= 1
        self.context_tokens -= job.tokens + self.steps - job.since_step
        job.since_step = -1

    def stepped(self, steps: int) -> None:
        """Count completed steps."""
        self.steps += steps
        self.context_tokens += steps * self._count

    def finished(self) -> list[Job]:
        """Jobs whose last token came in the step that has just ended."""
        return [job for job in self._due(self._finishes) if job.since_step >= 0]

    def crossing(self) -> list[Job]:
        """Jobs that need another block in the next step."""
        due = self._due(self._crossings)
        for job in due:
            heappush(self._crossings, (self.steps + self._block_tokens, job.order, job.since_step, job))
        return due

    def _due(self, heap: list[tuple[int, int, int, Job]]) -> list[Job]:
        due = []
        while heap and heap[0][0] <= self.steps:
            _steps, _order, joined, job = heappop(heap)
            if job.since_step == joined:
                due.append(job)
        return due

    def steps_left(self) -> list[tuple[int, Job]]:
        """(steps until it finishes, job) for each decoding job."""
        return [(steps - self.steps, job) for steps, _order, joined, job in self._finishes if job.since_step == joined]


class Step:
    """The current step, or a run of similar decode steps: its duration and its work."""

    def __init__(self) -> None:
        self.began_at = 0.0
        self.ends_at = math.inf
        self.count = 0
        self.chunks: list[tuple[Job, int]] = []
        self.first_s = 0.0
        """Duration of the first step of the run."""
        self.growth_s = 0.0
        """Added duration of each further step."""
        self.prefill_tokens = 0
        self.prefill_pairs = 0.0
        """Sum over the prefill tokens of the tokens before each."""
        self.decoding = 0
        self.context_tokens = 0
        """Context tokens of the decoding sequences in the first step."""
        self.over_at = -1.0
        """When the step before ended."""

    def begin(self, now: float, chunks: list[tuple[Job, int]], decoders: Decoders, profile: Profile) -> None:
        """Start a step, or a run of steps until the next event."""
        follows = self.prefill_tokens > 0 and self.over_at == now
        self.began_at, self.chunks = now, chunks
        self.prefill_tokens, self.prefill_pairs = 0, 0.0
        self.decoding, self.context_tokens = len(decoders), decoders.context_tokens
        for job, count in chunks:
            if count == 1 and job.computed > job.prompt_tokens:
                self.decoding += 1
                self.context_tokens += job.tokens
            else:
                self.prefill_tokens += count
                self.prefill_pairs += count * (job.computed - count / 2)
        self.first_s = profile.step_s(
            self.prefill_tokens, self.prefill_pairs, self.decoding, self.context_tokens, follows=follows
        )
        self.growth_s = 0.0
        self.count = 1
        if not chunks:
            alike = profile.steps_alike(decoders.steps, self.decoding, self.context_tokens)
            self.count = min(decoders.steps_alike, alike)
        if self.count > 1:
            self.growth_s = profile.decode_s(self.decoding, self.context_tokens + self.decoding) - self.first_s
        if profile.noise:
            factor = profile.noise_of(decoders.steps)
            self.first_s, self.growth_s = factor * self.first_s, factor * self.growth_s
        self.ends_at = now + self.seconds(self.count)

    def seconds(self, steps: int) -> float:
        """Duration of the first ``steps`` steps of the run."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    def cut(self, now: float) -> None:
        """Shorten the run to end with the step in progress at ``now``."""
        target = now - self.began_at
        low, high = 1, self.count
        while low < high:
            middle = (low + high) // 2
            if self.seconds(middle) >= target:
                high = middle
            else:
                low = middle + 1
        self.count = low
        self.ends_at = self.began_at + self.seconds(low)


class Listener(Protocol):
    """Callbacks of an engine. They must not add jobs to it directly."""

    def asks(self, engine: Engine, job: Job, now: float) -> None:
        """The job requests KV of other workers: set ``job.granted``, then call ``poke``."""

    def receives(self, engine: Engine, job: Job, now: float) -> None:
        """Blocks are reserved: start the reads, then call ``received``."""

    def computed(self, engine: Engine, job: Job, now: float) -> None:
        """A chunk of the prompt is computed."""

    def first_token(self, engine: Engine, job: Job, now: float) -> None:
        """The first token is generated."""

    def finished(self, engine: Engine, job: Job, now: float) -> None:
        """All tokens are generated; the job still holds its blocks."""


class Engine:
    """Call ``wake`` at ``wakes_at``. Any other call may change ``wakes_at``."""

    def __init__(self, profile: Profile, listener: Listener) -> None:
        self.profile = profile
        self._others = others = profile.other_groups
        self.pool = BlockPool(profile.kv_blocks, others)
        self._states = others.states if others is not None else 0
        self.host = HostTier(profile.host_blocks, self.pool.changes) if profile.host_blocks else None
        self.waiting: deque[Job] = deque()
        self.receiving: set[Job] = set()
        """Jobs with blocks for the whole prompt; KV is being read into some of them."""
        self.received_jobs: deque[Job] = deque()
        self.running: dict[Job, None] = {}
        """Running jobs in order of admission. Those that do not decode are computing their prompts."""
        self.decoders = Decoders(profile)
        self.waiting_tokens = 0
        """Prompt tokens accepted and not yet computed."""
        self.speeds = Speeds()
        self.step = Step()
        self._listener = listener
        self._block_tokens = profile.block_tokens
        self._admitted = 0

    @property
    def wakes_at(self) -> float:
        """Infinity when the engine is idle."""
        return self.step.ends_at

    @property
    def queued(self) -> int:
        """Number of sequences that are not running yet."""
        return len(self.waiting) + len(self.receiving) + len(self.received_jobs)

    def add(self, job: Job, now: float) -> None:
        """Append a job to the queue."""
        self.waiting.append(job)
        self.waiting_tokens += job.prompt_tokens
        self.poke(now)

    def received(self, job: Job, tokens: int, now: float) -> None:
        """Reading has ended; the KV of the first ``tokens`` tokens has arrived."""
        self.receiving.discard(job)
        if not job.preemptions:
            job.received_tokens = max(0, tokens - job.computed - job.loaded_tokens)
            job.received_s = now - (job.scheduled_at or now) if job.received_tokens else 0.0
        self._set_computed(job, max(job.computed, tokens))
        self._name_full(job, job.computed, arrived=True)
        self.received_jobs.append(job)
        self.poke(now)

    def poke(self, now: float) -> None:
        """Reschedule at the end of the current step, because something changed."""
        step = self.step
        if step.ends_at == math.inf:
            self._begin(now)
        elif step.count > 1:
            step.cut(now)

    def wake(self, now: float) -> None:
        """End the current steps and begin the next."""
        self._end(now)
        self._begin(now)

    def local_depth(self, job: Job) -> int:
        """Blocks of the job's prompt, from its start, that are of use in the cache, or behind that in host memory."""
        limit = job.cacheable(self.profile.block_tokens)
        depth = self.pool.boundary(job.chain, self.pool.depth(job.chain, limit))
        return depth if self.host is None else self.host.depth(job.chain, depth, limit)

    def tokens_of(self, job: Job) -> int:
        """Length of a job in tokens after the last completed step."""
        return job.tokens + (self.decoders.steps - job.since_step if job.since_step >= 0 else 0)

    def _end(self, now: float) -> None:
        step, decoders = self.step, self.decoders
        self.speeds.stepped(step)
        decoders.stepped(step.count)
        chunks, step.chunks = step.chunks, []
        step.ends_at, step.over_at = math.inf, now
        if self._others is None:
            for job, _count in chunks:
                self._name_full(job, job.computed)
        else:  # What is kept takes blocks, before any job that has ended releases its own.
            for job in self.running:
                self._name_full(job, self.tokens_of(job) - 1 if job.since_step >= 0 else job.computed)
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
        budget = self.profile.step_tokens_max
        chunks: list[tuple[Job, int]] = []
        preempted = self._continue_running(chunks, budget)
        budget -= len(self.decoders) + sum(count for _job, count in chunks)
        while self.received_jobs and budget > 0 and len(self.running) < self.profile.sequences_max:
            budget -= self._run(self.received_jobs.popleft(), chunks, budget, now)
        if not preempted:
            self._admit(chunks, budget, now)
        if chunks or self.decoders:
            self.step.begin(now, chunks, self.decoders, self.profile)
            if preempted:
                self.step.cut(now)
        elif preempted:
            self._begin(now)

    def _continue_running(self, chunks: list[tuple[Job, int]], budget: int) -> bool:
        """Reserve blocks for running jobs; returns whether one was preempted."""
        preempted = False
        for job in self.decoders.crossing():
            if job.since_step < 0:
                continue  # It was preempted for an earlier job.
            self._name_full(job, self.tokens_of(job) - 1)
            while not self.pool.take(1):
                preempted = True
                if self._preempt_youngest() is job:
                    break
            else:
                job.holding.nameless += 1
        budget -= len(self.decoders)
        for job in self._prompts():
            if budget <= 0 or job not in self.running:
                continue
            count = self._next_tokens(job, budget)
            while not self._extend(job, job.computed + count):
                preempted = True
                if self._preempt_youngest() is job:
                    break
            else:
                self._set_computed(job, job.computed + count)
                chunks.append((job, count))
                budget -= count
        return preempted

    def _prompts(self) -> list[Job]:
        """Running jobs that compute their prompts, in order of admission: the last one and, where steps end at
        boundaries, perhaps some before.
        """
        found: list[Job] = []
        wanted = len(self.running) - len(self.decoders)
        for job in reversed(self.running):
            if len(found) == wanted:
                break
            if job.since_step < 0:
                found.append(job)
        return found[::-1]

    def _next_tokens(self, job: Job, budget: int) -> int:
        count = min(job.tokens - job.computed, budget, self.profile.prompt_tokens_max)
        return count if self._others is None else self._others.step_tokens(count, job.computed, job.prompt_tokens)

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
        while asking < len(self.waiting) and budget > 0 and len(self.running) + asking < self.profile.sequences_max:
            job = self.waiting[asking]
            if not self._hold_prefix(job):
                break
            if job.fetches and job.granted is None:
                self._give_up(job)
                asking += 1
                if not job.has_requested:
                    job.has_requested = True
                    self._listener.asks(self, job, now)
                continue
            del self.waiting[asking]
            if self.host is not None:
                local = self.local_depth(job) * self.profile.block_tokens
                if local > max(job.computed, (job.granted or 0) if job.fetches else 0):
                    job.granted, job.fetches = local, True
            if job.fetches and job.granted is not None and job.granted > job.computed:
                self._receive(job, now)
            else:
                budget -= self._run(job, chunks, budget, now)

    def _receive(self, job: Job, now: float) -> None:
        if not self._extend(job, job.tokens):
            raise AssertionError("a job was admitted without free blocks for its tokens")
        self._schedule(job, now)
        job.fetches = False
        self.receiving.add(job)
        self._listener.receives(self, job, now)

    def _run(self, job: Job, chunks: list[tuple[Job, int]], budget: int, now: float) -> int:
        count = self._next_tokens(job, budget)
        if not self._extend(job, job.computed + count):
            raise AssertionError("a job was admitted without free blocks for its tokens")
        self._schedule(job, now)
        self._admitted += 1
        job.order = self._admitted
        self._set_computed(job, job.computed + count)
        self.running[job] = None
        chunks.append((job, count))
        return count

    def _schedule(self, job: Job, now: float) -> None:
        if self.host is not None:
            self.host.use(job.chain[: job.cacheable(self.profile.block_tokens)])
        if job.scheduled_at is None:
            job.scheduled_at = now
            job.cached_tokens = min(job.computed, job.prompt_tokens - 1)

    def _hold_prefix(self, job: Job) -> bool:
        """Hold the cached prefix, if there are blocks for the remaining tokens as well; returns whether it did."""
        size, pool = self.profile.block_tokens, self.pool
        limit = job.cacheable(size)
        depth = pool.depth(job.chain, limit)
        names = list(job.chain[:depth])
        while depth == len(names) >= len(job.chain) and len(names) < limit and pool.has(job.name_of(depth)):
            names.append(job.name_of(depth))  # Its own block from before a preemption.
            depth += 1
        depth, kept, more = self._usable(job, names)
        del names[depth:]
        if -(-job.tokens // size) - depth + self._states + more > pool.free_after_holding([*names, *kept]):
            return False
        pool.hold(names)
        pool.hold(kept)
        job.holding.named, job.holding.kept = names, kept
        pool.drop_kept(job.holding)
        job.filled = depth
        self._set_computed(job, depth * size)
        return True

    def _usable(self, job: Job, names: list[int]) -> tuple[int, list[int], int]:
        """After how many of these blocks the job continues, what the other groups keep there, and how many blocks they
        need for what is fetched. Full attention beyond the last boundary counts if a fetch brings what the others lack,
        up to less than the end of the fetch.
        """
        boundary, pool = self.pool.boundary(names, len(names)), self.pool
        goal = (job.granted or 0) if job.fetches else 0
        if self._others is None or goal <= boundary * self._block_tokens:
            return boundary, pool.kept_at(names, boundary), 0
        here = max(boundary, min(len(names), (goal - 1) // self._block_tokens))
        return here, [], self._others.blocks_at(goal // self._block_tokens)

    def _extend(self, job: Job, tokens: int) -> bool:
        holding = job.holding
        missing = max(0, -(-tokens // self.profile.block_tokens) - holding.blocks)
        states = self._states - holding.states
        if missing + states:
            if not self.pool.take(missing + states):
                return False
            holding.nameless += missing
            holding.states += states
        return True

    def _name_full(self, job: Job, computed: int, *, arrived: bool = False) -> None:
        """``arrived``: from another worker, with what the other groups need where these tokens end."""
        full = computed // self._block_tokens
        if full <= job.filled:
            return
        parent, others = job.name_of(job.filled - 1) if job.filled else None, self._others
        for index in range(job.filled, full):
            name = job.name_of(index)
            self.pool.name(job.holding, name, parent)
            if self.host is not None:
                self.host.store(name, parent)
            if others is not None and (
                index in others.needed(full) if arrived else others.keeps(index + 1, computed, job.prompt_tokens)
            ):
                self.pool.keep(job.holding, name)
            parent = name
        job.filled = full

    def _give_up(self, job: Job) -> None:
        self.pool.release(job.holding)
        job.filled = 0
        self._set_computed(job, 0)

    def _set_computed(self, job: Job, computed: int) -> None:
        prompt = job.prompt_tokens
        self.waiting_tokens += max(0, prompt - computed) - max(0, prompt - job.computed)
        job.computed = computed
