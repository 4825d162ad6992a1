"""The runs of a plan: each is kept in a folder under a key of everything that decides its result.

A run that is kept is not repeated; one whose code has changed has another key. So an interrupted study continues, and
a changed plan runs only what is new.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path

import msgspec

from bench.study.bound import Bound, feasible_share, upper_bound
from bench.study.code_digest import analysis_digest, digest_of, is_own
from bench.study.experiment import Setting, run_with_outcomes
from bench.study.plan import KNEE_OF, KNEE_SEED, Fleet, Workload, frozen
from bench.study.results import Result, Slo
from bench.study.samples import samples_of
from bench.study.workloads import generate
from replay.profile import PROFILES, Profile
from replay.traces import Request, at_load, read_trace

KNEE_RATIO = 1.05
"""Precision of the knee."""
KNEE_SHARE = 0.95
"""At the knee, this share of the requests that an idle fleet could serve within the targets is served so."""
KNEE_STEP = 1.5
KNEE_LOADS = (1 / 1024, 1024.0)
SAMPLE = 300
"""Requests of a made workload from which the first load of the search is estimated."""
BATCH = 16
"""Sequences that share a decode step, in that estimate."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """All inputs of a run."""

    workload: Workload
    trace: str = ""
    """Digest of the trace file."""
    fleet: Fleet
    profile: str
    """All values of the fleet's profile."""
    load: float
    policy: str
    seed: int
    slo: Slo
    code: str
    """Digest of the code."""

    @property
    def key(self) -> str:
        """Name of the run's file."""
        inputs = msgspec.json.encode(self, order="sorted")
        return hashlib.blake2b(inputs, digest_size=12).hexdigest()


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A case and what came of it."""

    case: Case
    ended_at: float
    took_s: float
    result: Result
    samples: bytes


class Store:
    """A folder of runs, which several processes may write."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def get(self, case: Case) -> Run | None:
        """A kept run; None also for a file that another version wrote."""
        try:
            return msgspec.msgpack.decode(self._path(case).read_bytes(), type=Run)
        except (OSError, msgspec.DecodeError):
            return None

    def has(self, case: Case) -> bool:
        """Whether it is kept."""
        return self._path(case).exists()

    def put(self, run: Run) -> None:
        """Keep a run."""
        self._write(self._path(run.case), run)

    def bound(self, case: Case) -> Bound | None:
        """The kept bound of these requests."""
        try:
            return msgspec.msgpack.decode(self._path(case).read_bytes(), type=Bound)
        except (OSError, msgspec.DecodeError):
            return None

    def put_bound(self, case: Case, bound: Bound) -> None:
        """Keep a bound."""
        self._write(self._path(case), bound)

    @staticmethod
    def _write(path: Path, what: Run | Bound) -> None:
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(msgspec.msgpack.encode(what))
        part.replace(path)

    def _path(self, case: Case) -> Path:
        return self._folder / f"{case.key}.run"


@dataclass(frozen=True, slots=True)
class Workshop:
    """What a process needs to run cases."""

    folder: Path
    traces: Mapping[str, Path]
    """Files by workload."""
    slo: Slo
    codes: Mapping[bool, str] = field(default_factory=lambda: {own: digest_of(own=own) for own in (False, True)})
    """Digests of the code, of Baton's runs and of others, when the study began: it may change while hours of runs go
    on, which use what was imported then.
    """

    def case(self, workload: Workload, fleet: Fleet, load: float, policy: str, seed: int) -> Case:
        """One run."""
        return Case(
            workload=workload,
            trace=file_digest(self.traces[workload.name]) if workload.is_trace else "",
            fleet=fleet,
            profile=repr(profile_of(fleet)),
            load=load,
            policy=policy,
            seed=seed,
            slo=self.slo,
            code=self.codes[is_own(policy)],
        )

    def requests(self, workload: Workload, fleet: Fleet, load: float, seed: int) -> list[Request]:
        """At that load."""
        trace = self.traces[workload.name] if workload.is_trace else None
        return made(trace or workload.name, workload.count(fleet), load, seed)

    def run(self, case: Case) -> Run:
        """The kept run, or a new one."""
        store = Store(self.folder)
        kept = store.get(case)
        if kept is not None:
            return kept
        began_s = time.monotonic()
        requests = self.requests(case.workload, case.fleet, case.load, case.seed)
        setting = Setting(
            requests=requests,
            split=case.fleet.split,
            profile=profile_of(case.fleet),
            slo=case.slo,
            seed=case.seed,
            slow=dict(case.fleet.slow),
        )
        result, outcomes = run_with_outcomes(setting, case.policy, 1.0)
        run = Run(
            case=case,
            ended_at=time.time(),
            took_s=time.monotonic() - began_s,
            result=result,
            samples=samples_of(requests, outcomes).encode(),
        )
        store.put(run)
        return run

    def run_kept(self, *cases: Case) -> None:
        """Run cases of the same requests where only their files are wanted: results are not sent between processes."""
        for case in cases:
            if not Store(self.folder).has(case):
                self.run(case)

    def bound(self, workload: Workload, fleet: Fleet, load: float, seed: int) -> Bound:
        """The clairvoyant bound of these requests; the kept one, or a new one."""
        case = msgspec.structs.replace(self.case(workload, fleet, load, "bound", seed), code=analysis_digest())
        store = Store(self.folder)
        kept = store.bound(case)
        if kept is None:
            requests = self.requests(workload, fleet, load, seed)
            kept = upper_bound(requests, fleet.split, profile_of(fleet), self.slo, slow=dict(fleet.slow))
            store.put_bound(case, kept)
        return kept

    def knee(self, workload: Workload, fleet: Fleet) -> float:
        """The largest load at which the best of ``KNEE_OF`` serves ``KNEE_SHARE`` of what an idle fleet could."""
        is_trace = workload.is_trace
        sample = self.requests(workload, fleet, 1.0, KNEE_SEED)[: None if is_trace else SAMPLE]
        wanted = KNEE_SHARE * feasible_share(sample, profile_of(fleet), self.slo)

        policies = [frozen().name(policy) for policy in KNEE_OF]

        def keeps(load: float) -> bool:
            return any(
                self.run(self.case(workload, fleet, load, policy, KNEE_SEED)).result.good_share >= wanted
                for policy in policies
            )

        return find_knee(keeps, first_guess(sample, fleet))


def profile_of(fleet: Fleet) -> Profile:
    """Of its engines."""
    profile = PROFILES[fleet.profile]
    return replace(profile, step_model=fleet.step_model, noise=fleet.noise, host_blocks=fleet.host_blocks)


@lru_cache(maxsize=2)
def made(source: Path | str, count: int, load: float, seed: int) -> list[Request]:
    """The first ``count`` requests of a trace, or of a workload by its name; kept, because all policies get them."""
    if isinstance(source, Path):
        return at_load(read_trace(source, seed=seed)[:count], load)
    return generate(source, count, seed=seed, per_s=load)


@cache
def file_digest(path: Path) -> str:
    """Of a file's content."""
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def first_guess(requests: Sequence[Request], fleet: Fleet) -> float:
    """A load at which half of the fleet is busy if nothing is cached, roughly: where the search for the knee begins."""
    span_s = max(request.at_s for request in requests) or 1.0
    profile = profile_of(fleet)
    batch_s = profile.decode_base_s / BATCH + profile.decode_per_sequence_s
    busy_s = sum(profile.prompt_s(one.input_tokens, 0) + one.output_tokens * batch_s for one in requests)
    return round(0.5 * len(fleet.split.roles()) * span_s / max(busy_s, 1e-9), 3)


def find_knee(keeps: Callable[[float], bool], guess: float) -> float:
    """The largest load that keeps what is wanted, to ``KNEE_RATIO``, assuming that smaller loads keep it, too."""
    low, high = KNEE_LOADS
    load = guess
    while low < load < high and not (low > KNEE_LOADS[0] and high < KNEE_LOADS[1]):
        if keeps(load):
            low = load
            load *= KNEE_STEP
        else:
            high = load
            load /= KNEE_STEP
    while high / low > KNEE_RATIO and low > KNEE_LOADS[0] and high < KNEE_LOADS[1]:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return float(f"{low:.3g}")


class Failed(Exception):
    """Some work failed; the message has all reasons."""


def in_parallel(
    jobs: int, works: Mapping[str, Sequence[object]], call: Callable[..., object]
) -> Iterator[tuple[str, object]]:
    """Names and results of ``call(*arguments)``, as they end; ``works``: arguments by name.

    One that fails does not stop the others. Raises Failed after all have ended.
    """
    problems = []
    with ProcessPoolExecutor(jobs) as pool:
        waiting: dict[Future[object], str] = {pool.submit(call, *given): name for name, given in works.items()}
        try:
            while waiting:
                ended, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for one in ended:
                    name = waiting.pop(one)
                    error = one.exception()
                    if error is None:
                        yield name, one.result()
                    else:
                        problems.append(f"{name}: {error!r}")
        finally:
            for one in waiting:
                one.cancel()
    if problems:
        raise Failed("\n".join(problems))
