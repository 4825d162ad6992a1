"""The router's benchmark takes only requests whose KV moved."""

from __future__ import annotations

import pytest

from bench.bench_peers import baton_running
from bench.bench_router import CACHED_PROMPTS, CHECKOUT, running, send
from bench.peer_checks import RunFailed

pytestmark = pytest.mark.slow
REQUESTS = {"connections": 8, "requests": 32}


def test_prompts_that_engines_have_or_that_have_no_block_are_refused():
    with running(1) as system:
        _result, moved = send(system, seed="new", prompt_tokens=100, **REQUESTS)
        assert (moved.requests, moved.handoffs) == (32, 32)
        assert moved.bytes > 0

        for options in ({"prompt_tokens": 100, "prompts": CACHED_PROMPTS}, {"prompt_tokens": 15}):
            with pytest.raises(RunFailed, match="requests moved no KV"):
                send(system, seed=f"{options}", **options, **REQUESTS)


def test_a_run_beside_other_routers_counts_batons_handoffs():
    with baton_running("Baton", CHECKOUT, 1) as contender:
        result = contender.send(32, seed="new", prompt_tokens=100, **REQUESTS)

        assert (result["moved"].requests, result["moved"].handoffs) == (32, 32)
        with pytest.raises(RunFailed, match="requests moved no KV"):
            contender.send(32, seed="new", prompt_tokens=100, **REQUESTS)
