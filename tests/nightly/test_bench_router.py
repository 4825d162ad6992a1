"""The router's benchmark takes only requests whose KV moved."""

from __future__ import annotations

import pytest

from bench.bench_peers import Row, baton_running, cpu_us
from bench.bench_router import CACHED_PROMPTS, CHECKOUT, cost, running, send
from bench.peer_checks import RunFailed

pytestmark = pytest.mark.slow
REQUESTS = {"connections": 8, "requests": 32}


def test_prompts_that_engines_have_or_that_have_no_block_are_refused():
    with running(1) as system:
        result, moved = cost(system, seed="new", prompt_tokens=100, **REQUESTS)
        assert (moved.requests, moved.handoffs) == (32, 32)
        assert moved.bytes > 0
        assert result["cpu_s"] > 0

        for options in ({"prompt_tokens": 100, "prompts": CACHED_PROMPTS}, {"prompt_tokens": 15}):
            with pytest.raises(RunFailed, match="requests moved no KV"):
                send(system, seed=f"{options}", **options, **REQUESTS)


def test_a_row_beside_other_routers_counts_batons_handoffs():
    row = Row("short", 1, {"connections": 8, "requests": 32}, "µs/request", cpu_us, 32)
    with baton_running("Baton", CHECKOUT, 1) as contender:
        contender.send(32, connections=8, requests=32, seed="warm-up")
        cpu_s, result = contender.measure(row, 1)

    assert cpu_s > 0
    assert (result["moved"].requests, result["moved"].handoffs) == (32, 32)
