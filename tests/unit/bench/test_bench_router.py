"""The router's benchmark: differences are paired by round, and routers are idle before they are measured."""

from __future__ import annotations

from bench.bench_router import is_falling, latency_row
from bench.handoffs import Moved


def test_added_latency_is_the_median_of_the_rounds_differences():
    alone = [{"p50": 1.0, "p99": 5.0}, {"p50": 2.0, "p99": 50.0}, {"p50": 3.0, "p99": 6.0}]
    routed = [{"p50": 2.0, "p99": 8.0}, {"p50": 3.0, "p99": 54.0}, {"p50": 4.0, "p99": 8.0}]
    moved = [Moved(10, 10, 1_000_000)] * 3
    cells = latency_row("50 | short", alone, routed, {"p50": 0.5}, moved).split(" | ")

    assert cells[2:] == [
        "2.00 / 6.00", "3.00 / 8.00", "1.00 (1.00 to 1.00)", "3.00 (2.00 to 4.00)", "1.00", "30 of 30, 3 MB |",
    ]  # fmt: skip


def test_routers_are_idle_when_none_used_less_in_the_last_window_than_in_each_before():
    assert is_falling([[0.3, 0.1], [0.2, 0.1], [0.1, 0.2]])
    assert is_falling([[0.1, 0.3], [0.2, 0.2], [0.3, 0.1]])
    assert not is_falling([[0.1, 0.1], [0.3, 0.1], [0.2, 0.2]])
    assert not is_falling([[0.100, 0.1], [0.102, 0.1], [0.099, 0.1]])
