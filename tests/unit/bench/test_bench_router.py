"""The router's benchmark: added latency is paired by round."""

from __future__ import annotations

from bench.bench_router import latency_row
from bench.handoffs import Moved


def test_added_latency_is_the_median_of_the_rounds_differences():
    alone = [{"p50": 1.0, "p99": 5.0}, {"p50": 2.0, "p99": 50.0}, {"p50": 3.0, "p99": 6.0}]
    routed = [{"p50": 2.0, "p99": 8.0}, {"p50": 3.0, "p99": 54.0}, {"p50": 4.0, "p99": 8.0}]
    moved = [Moved(10, 10, 1_000_000)] * 3
    cells = latency_row("50 | short", alone, routed, {"p50": 0.5}, moved).split(" | ")

    assert cells[2:] == [
        "2.00 / 6.00", "3.00 / 8.00", "1.00 (1.00 to 1.00)", "3.00 (2.00 to 4.00)", "1.00", "30 of 30, 3 MB |",
    ]  # fmt: skip
