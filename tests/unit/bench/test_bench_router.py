"""The router's benchmark: differences are paired by round, and routers are idle before they are measured."""

from __future__ import annotations

from bench.bench_router import is_falling, latency_row
from bench.engine_handoffs import ASKED, BATON, ENGINE, ROLES, SERVER, VLLM, Taken, lines
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


def taken(server_ms: float, p50_ms: float) -> Taken:
    cpu_ms = {f"{role} {kind}": server_ms for kind in (SERVER, ENGINE) for role in ROLES}
    return Taken(cpu_ms, {"p50": p50_ms, "p99": 2 * p50_ms}, Moved(10, 10, 1_000_000))


def test_what_baton_adds_on_real_engines_is_the_median_of_the_rounds_differences():
    servers = {
        ASKED: [taken(1.0, 10.0), taken(2.0, 20.0), taken(9.0, 30.0)],
        VLLM: [taken(1.0, 12.0), taken(2.0, 22.0), taken(9.0, 32.0)],
        BATON: [taken(1.1, 11.0), taken(2.2, 22.0), taken(9.3, 36.0)],
    }

    text = "\n".join(
        lines(
            ["100 tokens"],
            ["50"],
            {(load, way): runs for load in ("100 tokens", "50") for way, runs in servers.items()},
        )
    )

    assert "| 100 tokens | vLLM, both asked | +0.20 (+0.10 to +0.30) |" in text
    assert "| +0.40 (+0.20 to +0.60) |" in text, "both servers"
    assert "| +2.0 (+1.0 to +6.0) | +4.0 (+2.0 to +12.0) | +0.0 (-1.0 to +4.0) |" in text
    assert "| 30 of 30, 3 MB |" in text
