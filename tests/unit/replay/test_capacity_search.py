"""The search for a split, on fleets whose limits are known by formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest

from replay.capacity.search import PRECISION, Search, next_loads
from replay.capacity.trial import Question, Resource, Target, Trial
from replay.split import Split
from replay.spread import Spread

TARGET = Target(ttft_s=1.0, itl_s=0.1, share=0.95)
Carries = Callable[[Question], float]


class KnownFleets:
    """A runner whose splits carry what a formula says."""

    def __init__(self, carries: Carries, jobs: int = 1) -> None:
        self.case = SimpleNamespace(target=TARGET)
        self.jobs = jobs
        self.trials: dict[Question, Trial] = {}
        self._carries = carries

    def ask(self, questions: Iterable[Question]) -> list[Trial]:
        asked = list(questions)
        for question in asked:
            self.trials[question] = self._trial(question)
        return [self.trials[question] for question in asked]

    def _trial(self, question: Question) -> Trial:
        used = question.load / max(1e-9, self._carries(question))
        over = max(0.0, used - 1)
        return Trial(
            split=question.split,
            load=question.load,
            requests=1000,
            in_time=max(0.0, 0.95 - over / 2) if over else 1.0,
            stopped=False,
            late=0,
            slow=0,
            refused=0,
            ttft=Spread(p95=used, mean=used),
            itl=Spread(),
            hit_share=0.0,
            busy={},
            preemptions=0,
            seconds=100.0,
            cpu_s=0.0,
        )


def pipeline(prefill_rate: float, decode_rate: float, penalty: float = 0.8) -> Carries:
    """Prefill and decode workers limit each other; those for both do either, with a loss."""

    def carries(question: Question) -> float:
        split = question.split
        most = 0.0
        for part in range(101):
            both_prefill = split.both * part / 100 * penalty
            both_decode = split.both * (1 - part / 100) * penalty
            prefill = prefill_rate * (split.prefill + both_prefill)
            most = max(most, min(prefill, decode_rate * (split.decode + both_decode)))
        return most

    return carries


def all_splits(workers: int) -> list[Split]:
    pairs = [(p, d) for p in range(workers + 1) for d in range(workers + 1 - p)]
    return [split for p, d in pairs if (split := Split(p, d, workers - p - d)).can_serve]


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("workers", [1, 2, 5, 16])
@pytest.mark.parametrize(("prefill_rate", "decode_rate"), [(0.3, 0.3), (0.9, 0.15), (0.1, 0.7)])
def test_the_best_split_is_found_without_trying_all(workers, prefill_rate, decode_rate, jobs):
    carries = pipeline(prefill_rate, decode_rate)
    runner = KnownFleets(carries, jobs)

    found = Search(runner).best_split(workers)

    best = max(carries(Question(split)) for split in all_splits(workers))
    assert carries(Question(found.split)) >= best / PRECISION
    assert found.keeps <= carries(Question(found.split)) < found.fails <= found.keeps * PRECISION
    if workers >= 16:
        assert len(runner.trials) < len(all_splits(workers)) / 2


def test_workers_for_both_win_where_nothing_is_lost_by_mixing():
    found = Search(KnownFleets(pipeline(1.0, 0.31, penalty=1.0))).best_split(4)

    assert found.split == Split(both=4)


def test_limits_of_other_splits_are_as_precise_as_that_of_the_best():
    carries = pipeline(0.9, 0.15)
    search = Search(KnownFleets(carries))
    search.best_split(5)

    search.limits_of(list(search.limits))

    for split, limit in search.limits.items():
        assert not limit.beaten
        assert limit.keeps <= carries(Question(split)) < limit.fails <= limit.keeps * PRECISION


def test_only_the_wanted_splits_are_tried():
    runner = KnownFleets(pipeline(0.5, 0.5))
    wanted = [Split(1, 3), Split(both=4)]

    assert Search(runner).best_split(4, wanted).split == Split(both=4)
    assert {question.split for question in runner.trials} == set(wanted)


@pytest.mark.parametrize("each", [0.9, 0.11, 0.017])
@pytest.mark.parametrize("started_from", [None, 4])
def test_the_smallest_fleet_is_enough_and_one_worker_less_is_not(each, started_from):
    def carries(question: Question) -> float:
        return each * question.split.workers

    search = Search(KnownFleets(carries))
    like = search.best_split(started_from) if started_from else None

    smallest = search.smallest(like)

    assert smallest is not None
    assert smallest.split.workers == math.ceil(1 / each)


def test_a_load_that_no_fleet_carries_has_no_smallest_fleet():
    assert Search(KnownFleets(lambda _question: 0.0)).smallest(None) is None


def test_the_bottleneck_is_the_resource_whose_doubling_helps_most():
    def carries(question: Question) -> float:
        return {Resource.KV: 2.0, Resource.PREFILL: 1.02}.get(question.more_of, 1.0)

    search = Search(KnownFleets(carries))
    found = search.bottleneck(search.best_split(2))

    assert found is not None
    assert found.resource == Resource.KV.value
    assert set(found.with_twice) == {resource.value for resource in Resource}


def test_nothing_is_called_a_bottleneck_that_does_not_help():
    search = Search(KnownFleets(lambda _question: 1.0))
    found = search.bottleneck(search.best_split(2))

    assert found is not None
    assert found.resource == ""


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(("low", "high"), [(0.0, math.inf), (0.0, 1.0), (1.0, math.inf), (1.0, 2.0)])
def test_loads_to_try_are_new_and_in_order(low, high, count):
    loads = next_loads(low, high, count)

    assert len(loads) == count
    assert loads == sorted(set(loads))
    assert all(low < load < high for load in loads)


@pytest.mark.parametrize("most", [0.0, math.inf])
def test_the_search_ends_where_no_load_or_every_load_is_kept(most):
    found = Search(KnownFleets(lambda _question: most)).best_split(1)

    assert (found.keeps > 0) == (most > 0)
    assert math.isinf(found.fails) == (most > 0)
