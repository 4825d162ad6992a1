"""Rates, totals over restarts, histograms and bounded label sets."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.collector.metrics.windows import OTHER, WINDOW_S, Histogram, LabelSet, Rate, Totals

TIMES = st.lists(st.floats(0.0, 60.0), max_size=50).map(sorted)


def test_a_rate_is_the_mean_of_the_last_ten_seconds():
    rate = Rate(0.0)
    for second in range(30):
        rate.add(5.0, float(second))

    assert rate.per_second(29.0) == 5.0
    assert rate.per_second(29.0 + WINDOW_S) == 0.0


def test_a_young_rate_is_averaged_over_at_least_one_second():
    rate = Rate(100.0)
    rate.add(8.0, 100.0)

    assert rate.per_second(100.1) == 8.0
    assert rate.per_second(104.0) == 2.0


@given(TIMES, st.floats(0.0, 30.0))
def test_a_rate_covers_exactly_its_window(times, later):
    rate = Rate(0.0)
    for time in times:
        rate.add(1.0, time)
    now = (times[-1] if times else 0.0) + later

    in_window = sum(1 for time in times if int(time) > int(now) - WINDOW_S)

    assert rate.per_second(now) == pytest.approx(in_window / min(WINDOW_S, max(1.0, now)))


def test_totals_keep_growing_when_their_source_restarts():
    totals = Totals()
    totals.grow(1, {"tokens": 100.0})
    assert totals.grow(1, {"tokens": 130.0}) == {"tokens": 30.0}

    assert totals.grow(2, {"tokens": 20.0}) == {"tokens": 20.0}
    assert totals.values == {"tokens": 150.0}


def test_older_epochs_and_late_messages_add_nothing():
    totals = Totals()
    totals.grow(2, {"tokens": 50.0})

    assert totals.grow(1, {"tokens": 900.0}) == {"tokens": 0.0}
    assert totals.grow(2, {"tokens": 40.0}) == {"tokens": 0.0}
    assert totals.grow(2, {"tokens": 55.0}) == {"tokens": 5.0}


LIVES = st.lists(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=10).map(sorted), min_size=1, max_size=5)


@given(LIVES)
def test_totals_sum_the_maximum_of_each_epoch(lives):
    totals = Totals()
    seen = [0.0]
    for epoch, life in enumerate(lives, start=1):
        for total in life:
            growth = totals.grow(epoch, {"n": total})
            seen.append(totals.values["n"])
            assert growth["n"] == pytest.approx(seen[-1] - seen[-2], abs=1e-6)

    assert seen[-1] == pytest.approx(math.fsum(life[-1] for life in lives))
    assert all(after >= before for before, after in pairwise(seen))


@given(st.lists(st.floats(0.0, 10.0), max_size=100))
def test_a_histogram_counts_each_value_in_the_first_fitting_bucket(values):
    bounds = (0.1, 1.0, 5.0)
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)

    assert sum(histogram.counts) == histogram.count == len(values)
    for index, bound in enumerate(bounds):
        assert sum(histogram.counts[: index + 1]) == sum(1 for value in values if value <= bound)
    assert histogram.sum == pytest.approx(math.fsum(values))


@given(st.lists(st.text(max_size=3), max_size=50), st.integers(1, 5))
def test_a_label_set_has_at_most_its_maximum_plus_other(values, values_max):
    labels = LabelSet(values_max)
    shown = [labels.bounded(value) for value in values]

    assert len(set(shown)) <= values_max + 1
    assert all(given in (value, OTHER) for given, value in zip(shown, values, strict=True))
