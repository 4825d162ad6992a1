"""The page of the KV benchmarks: medians with their intervals, and parts that replace their like."""

from __future__ import annotations

import pytest

from bench.kv_bench_page import Measured, median_interval, page, parts_of

ORDER = ("handoff", "turns")


@pytest.mark.parametrize(
    ("count", "outside"),
    [(1, 0), (5, 0), (6, 0), (9, 1), (15, 3), (20, 5)],  # of the sign test's table
)
def test_a_median_lies_between_the_values_of_the_sign_test(count, outside):
    values = list(range(count))

    assert median_interval(values[::-1]) == (outside, count - 1 - outside)


def test_a_part_that_is_measured_anew_replaces_the_one_that_was_there():
    first = {name: Measured([f"## {name}", "", "old", ""], "then") for name in ORDER}
    old = page(["# Head"], first, ORDER, "")

    new = page(["# Head"], {"turns": Measured(["## turns", "", "new", ""], "now")}, ORDER, old)

    handoff, turns = parts_of(new).values()
    assert ("old" in handoff, "then" in handoff) == (True, True)
    assert ("old" in turns, "new" in turns, "*now*" in turns) == (False, True, True)
    assert new.count("# Head") == 1
    assert page(["# Head"], {}, ORDER, new).rstrip() == new.rstrip()
