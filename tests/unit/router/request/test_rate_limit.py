"""Requests and tokens per minute."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.router.request.rate_limit import Bucket, RateLimit, tokens_used
from shared.contracts.api_keys import Key


def test_a_minutes_requests_may_burst_and_then_refill_steadily():
    rate_limit = RateLimit(Key(requests_per_minute=3), 100.0)

    assert [rate_limit.request(100.0) for _ in range(3)] == [None] * 3
    over = rate_limit.request(100.0)
    assert (over.kind, over.per_minute, over.wait_s) == ("requests", 3, 20.0)
    assert rate_limit.request(119.0) is not None
    assert rate_limit.request(120.0) is None
    assert rate_limit.request(120.0) is not None


def test_overdrawn_tokens_must_refill_before_the_next_request():
    rate_limit = RateLimit(Key(tokens_per_minute=60), 0.0)

    assert rate_limit.admit(0.0, sequences=1, tokens=90) is None
    assert rate_limit.admit(30.0, sequences=1, tokens=1).wait_s == 1.0
    assert rate_limit.request(30.0).kind == "tokens"
    assert rate_limit.request(31.0) is None


def test_unused_tokens_are_refunded_and_extra_tokens_charged():
    rate_limit = RateLimit(Key(tokens_per_minute=60), 0.0)
    rate_limit.admit(0.0, sequences=1, tokens=50)

    rate_limit.settle(0.0, 50, 0)
    assert rate_limit.left(0.0) == [("tokens", 60, 60)]
    rate_limit.admit(0.0, sequences=1, tokens=10)
    rate_limit.settle(0.0, 10, 35)
    assert rate_limit.left(0.0) == [("tokens", 60, 25)]


def test_a_key_without_limits_is_never_limited():
    rate_limit = RateLimit(Key(), 0.0)

    assert rate_limit.request(0.0) is None
    assert rate_limit.admit(0.0, sequences=1 << 20, tokens=1 << 60) is None
    rate_limit.settle(0.0, 0, 1 << 60)
    assert rate_limit.left(0.0) == []


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 30), st.integers(0, 500)), max_size=50))
def test_bursts_and_rate_stay_within_the_limit_per_minute(per_minute, takes):
    bucket, now, taken, last = Bucket(per_minute, 0.0), 0.0, 0, 0
    for after_s, amount in takes:
        now += after_s
        if bucket.wait_s(now) == 0.0:
            bucket.take(now, amount)
            taken, last = taken + amount, amount

    assert taken - last <= per_minute * (1 + now / 60) + 1e-6
    assert bucket.level(now) <= per_minute


def test_tokens_used_counts_the_known_prompt_and_completion():
    known = {"prompt_charged": 10, "prompt": 12, "completion": 5, "relayed": 3, "unseen": 7}

    assert tokens_used(**known) == (12, 5)
    assert tokens_used(**known | {"prompt": -1, "completion": -1}) == (10, 7)
    assert tokens_used(**known | {"prompt": 0, "completion": -1, "relayed": 9}) == (10, 9)
    assert tokens_used(**known | {"prompt": 0, "completion": 0}) == (10, 0)
