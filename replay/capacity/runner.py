"""Runs simulations, several at a time on several cores, and says how far it is."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager

from replay.capacity.trial import Case, Question, Trial, try_out

Done = Callable[[Trial], None]


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


_case: Case | None = None
"""Of this process of the pool."""


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
