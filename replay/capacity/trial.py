"""One split of a fleet under one load, in virtual time: how many requests were in time, and what the others missed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum

import msgspec

from replay.legs import ReplayedRequest
from replay.profile import Profile
from replay.router import NETWORK_S
from replay.split import Split
from replay.spread import Spread, spread_of
from replay.traces import Request, at_load
from replay.world import World
from services.router.admission.policy import AdmissionPolicy
from services.router.placement.slo import Targets
from services.worker.engines.simulated.core.settings import tokens_max
from shared.contracts.workers import Role

CHECKED_EVERY = 32
"""Arrivals between two counts of the misses."""


class Resource(StrEnum):
    """What may limit a fleet."""

    PREFILL = "prefill compute"
    DECODE = "decode speed"
    KV = "KV memory"
    NETWORK = "KV transfer"


def doubled(profile: Profile, resource: Resource | None) -> Profile:
    """An engine like this one with twice as much of one resource."""
    match resource:
        case Resource.PREFILL:
            return replace(
                profile,
                prefill_tokens_per_s=2 * profile.prefill_tokens_per_s,
                prefill_base_s=profile.prefill_base_s / 2,
                prefill_s_per_pair=profile.prefill_s_per_pair / 2,
            )
        case Resource.DECODE:
            return replace(
                profile,
                decode_base_s=profile.decode_base_s / 2,
                decode_per_sequence_s=profile.decode_per_sequence_s / 2,
                decode_per_context_token_s=profile.decode_per_context_token_s / 2,
            )
        case Resource.KV:
            return replace(profile, kv_blocks=2 * profile.kv_blocks)
        case Resource.NETWORK:
            return replace(profile, transfer_bytes_per_s=2 * profile.transfer_bytes_per_s)
        case None:
            return profile


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What a share of the requests must meet."""

    ttft_s: float
    """Seconds from the arrival to the first token."""
    itl_s: float
    """Seconds between tokens, on average over a request."""
    share: float


class Question(msgspec.Struct, frozen=True):
    """What is simulated."""

    split: Split
    load: float = 1.0
    """How many times as fast the requests arrive."""
    more_of: Resource | None = None
    """A resource that every engine has twice as much of."""
    to_the_end: bool = False
    """Simulate on, even when too many requests have missed their targets."""
    whole: bool = False
    """All requests of the workload, not only the piece to search with."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one simulation."""

    split: Split
    load: float
    requests: int
    """All requests, including those that do not fit into any engine."""
    in_time: float
    """Share of the requests that met both targets; an upper bound if ``stopped``."""
    stopped: bool
    """The simulation ended early, because too many requests had missed a target; the other figures are then of the
    requests that ended.
    """
    late: int
    """Requests with a late first token."""
    slow: int
    """Requests whose first token was in time and whose tokens were too far apart."""
    refused: int
    """Requests that the router refused, because they would have been late."""
    ttft: Spread
    itl: Spread
    """Spread of each request's mean time between tokens."""
    hit_share: float
    """Share of the prompt tokens found in the cache of the worker that computed the prompt."""
    busy: dict[str, float]
    """Share of the time that the workers of each role spent in steps."""
    preemptions: int
    """Requests that lost their KV for want of memory, and were computed again."""
    seconds: float
    """Length of the load."""
    cpu_s: float
    """CPU time of the simulation."""

    def keeps(self, share: float) -> bool:
        """Whether enough requests were in time."""
        return not self.stopped and self.in_time >= share


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Common to all simulations of a plan."""

    requests: list[Request]
    """Requests to search with, at load 1."""
    whole: list[Request]
    too_large: int
    """Requests beside ``requests`` that do not fit into any engine: a router refuses them."""
    whole_too_large: int
    profile: Profile
    by_role: Mapping[Role, Profile] = field(default_factory=dict)
    """Engines of a role that are not as ``profile``."""
    target: Target

    @property
    def misses_max(self) -> float:
        """Share of misses after which a simulation ends: enough to draw how a fleet fails."""
        return max(0.3, 2 * (1 - self.target.share))


def try_out(case: Case, question: Question) -> Trial:
    """Simulate one split under one load."""
    base, too_large = (case.whole, case.whole_too_large) if question.whole else (case.requests, case.too_large)
    requests = at_load(base, question.load)
    count = len(requests) + too_large
    misses_max = count if question.to_the_end or question.whole else int(case.misses_max * count)
    world = WatchedWorld(
        question.split,
        doubled(case.profile, question.more_of),
        {role: doubled(profile, question.more_of) for role, profile in case.by_role.items()},
        case.target,
        len(requests),
        misses_max - too_large,
    )
    began_s = time.process_time()
    try:
        world.run(requests)
    except TooManyMisses:
        stopped = True
    else:
        stopped = False
    cpu_s = time.process_time() - began_s
    return summarise(case.target, question, world, (count, too_large), stopped=stopped, cpu_s=cpu_s)


class TooManyMisses(Exception):
    """More requests have missed a target than are of interest."""


class WatchedWorld(World):
    """A world of ``count`` requests that ends with TooManyMisses when more than ``misses_max`` have missed a target."""

    def __init__(
        self,
        split: Split,
        profile: Profile,
        by_role: Mapping[Role, Profile],
        target: Target,
        count: int,
        misses_max: int,
    ) -> None:
        super().__init__(split, profile, by_role=by_role)
        self.targets = Targets(ttft_s=target.ttft_s, itl_s=target.itl_s)
        self.admit(AdmissionPolicy())
        self.arrived: list[ReplayedRequest] = []
        self.busy: dict[str, float] = {}
        """Share of the time in steps, by role, as of the last arrival: then the load ends."""
        self._target = target
        self._requests = count
        self._misses_max = misses_max
        self._open: list[ReplayedRequest] = []
        self._misses = 0

    def _arrives(self, now: float, replayed: ReplayedRequest) -> None:
        self.arrived.append(replayed)
        self._open.append(replayed)
        if len(self.arrived) % CHECKED_EVERY == 0:
            self._count(now)
        if len(self.arrived) == self._requests:
            self.busy = busy_of(self)
        super()._arrives(now, replayed)

    def _count(self, now: float) -> None:
        still_open = []
        for replayed in self._open:
            if missed(replayed, self._target, now):
                self._misses += 1
            elif replayed.finished_at is None:
                still_open.append(replayed)
        self._open = still_open
        if self._misses > self._misses_max:
            raise TooManyMisses


def missed(replayed: ReplayedRequest, target: Target, now: float) -> bool:
    """Whether it is known at ``now`` that it misses a target."""
    if replayed.refused_at is not None:
        return True
    if replayed.first_token_at is None:
        return now - replayed.request.at_s > target.ttft_s
    late = replayed.ttft_s > target.ttft_s
    return late or (replayed.finished_at is not None and replayed.tpot_s > target.itl_s)


def summarise(
    target: Target, question: Question, world: WatchedWorld, counts: tuple[int, int], *, stopped: bool, cpu_s: float
) -> Trial:
    """``counts``: all requests, and those among them that are too large for any engine."""
    requests, too_large = counts
    arrived, now = world.arrived, world.now
    served = [one for one in arrived if one.finished_at is not None]
    answered = [one for one in arrived if one.first_token_at is not None]
    refused = sum(one.refused_at is not None for one in arrived)
    misses = sum(missed(one, target, now) for one in arrived)
    late = sum(one.ttft_s > target.ttft_s for one in answered) + len(arrived) - len(answered) - refused
    prompt_tokens = max(1, sum(one.request.input_tokens for one in answered))
    return Trial(
        split=question.split,
        load=question.load,
        requests=requests,
        in_time=1 - (misses + too_large) / requests,
        stopped=stopped,
        late=late,
        slow=sum(one.ttft_s <= target.ttft_s and one.tpot_s > target.itl_s for one in served),
        refused=refused + too_large,
        ttft=spread_of([one.ttft_s for one in answered], len(arrived) - len(answered) + too_large),
        itl=spread_of([one.tpot_s for one in served if one.request.output_tokens > 1]),
        hit_share=sum(one.cached_tokens for one in answered) / prompt_tokens,
        busy=world.busy or busy_of(world),
        preemptions=sum(one.preemptions for one in arrived),
        seconds=max(arrived[-1].request.at_s, 1e-9) if arrived else 0.0,
        cpu_s=cpu_s,
    )


def busy_of(world: World) -> dict[str, float]:
    """Share of the time in steps, by role."""
    found: dict[str, float] = {}
    for role in Role:
        engines = [worker.engine for worker in world.workers.values() if worker.record.role is role]
        if engines:
            found[role.value] = sum(engine.speeds.busy_s for engine in engines) / (len(engines) * max(world.now, 1e-9))
    return found


def alone_s(request: Request, cached: int, profile: Profile) -> tuple[float, float]:
    """Time to the first token and between tokens on an idle engine that has ``cached`` prompt tokens."""
    context = request.input_tokens + request.output_tokens / 2
    between_s = profile.decode_s(1, context) if request.output_tokens > 1 else 0.0
    return 2 * NETWORK_S + profile.prompt_s(request.input_tokens, cached), between_s


def fits(request: Request, profile: Profile) -> bool:
    """Whether an engine has room for it, or one rank of a data parallel group."""
    tokens = tokens_max(profile.groups, profile.kv_blocks // profile.data_ranks - 1, profile.block_tokens)
    return request.input_tokens + request.output_tokens <= tokens


Done = Callable[[Trial], None]


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


_case: Case | None = None
"""The case of this process of the pool."""


def _begin(case: Case) -> None:
    global _case  # an initializer of a pool has no other way to hand something on
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which ends the pool.
    _case = case


def _answer(question: Question) -> Trial:
    assert _case is not None
    return try_out(_case, question)


class Runner:
    """Answers questions about one case; each is simulated once. ``jobs``: simulations at a time."""

    def __init__(self, case: Case, jobs: int, pool: ProcessPoolExecutor | None) -> None:
        self.case = case
        self.jobs = jobs
        self.trials: dict[Question, Trial] = {}
        self.done: Done = lambda _trial: None
        """Called after each simulation."""
        self._pool = pool

    def ask(self, questions: Iterable[Question]) -> list[Trial]:
        """In the order of the questions."""
        asked = list(questions)
        missing = [question for question in dict.fromkeys(asked) if question not in self.trials]
        for question, trial in self._simulate(missing):
            self.trials[question] = trial
            self.done(trial)
        return [self.trials[question] for question in asked]

    def _simulate(self, questions: list[Question]) -> Iterator[tuple[Question, Trial]]:
        if self._pool is None or len(questions) == 1 == self.jobs:
            for question in questions:
                yield question, try_out(self.case, question)
            return
        running: dict[Future[Trial], Question] = {self._pool.submit(_answer, one): one for one in questions}
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()


@contextmanager
def runner(case: Case, jobs: int) -> Iterator[Runner]:
    """A runner with as many processes, or without any for one job."""
    if jobs == 1:
        yield Runner(case, 1, None)
        return
    # Not forked: the progress bar's thread may hold a lock.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(case,))
    try:
        yield Runner(case, jobs, pool)
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()  # A simulation takes up to minutes; nobody waits for its result.
        raise
    finally:
        pool.shutdown(cancel_futures=True)
