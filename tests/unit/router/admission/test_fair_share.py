"""Virtual token counters: the tenant with the lowest counter is next, and idle time gives no credit."""

from __future__ import annotations

import pytest

from services.router.admission.fair_share import TENANTS_MAX, FairShare, cost_of


def served(share: FairShare, name: str, cost: float) -> None:
    """Charge a tenant that has nothing queued."""
    share.enter(name)
    share.charge(name, cost)
    share.leave(name)


def test_only_computed_tokens_cost_and_completions_cost_more():
    assert cost_of(100, 0) < cost_of(0, 100)
    assert cost_of(0, 0) > 0


def test_a_late_tenant_starts_at_the_others_counter():
    share = FairShare({})
    share.enter("early")
    share.charge("early", 1000)

    share.enter("late")

    assert share.served("late") == share.served("early") == 1000


def test_a_returning_tenant_is_lifted_to_the_lowest_waiting_counter():
    share = FairShare({})
    served(share, "away", 10)
    share.enter("a")
    share.enter("b")
    share.charge("a", 500)
    share.charge("b", 900)

    share.enter("away")

    assert share.served("away") == share.served("a")


def test_a_returning_tenants_higher_counter_is_not_lowered():
    share = FairShare({})
    served(share, "greedy", 1000)
    share.enter("modest")
    before = share.served("greedy")

    share.enter("greedy")

    assert share.served("greedy") == before


def test_with_an_empty_queue_a_newcomer_takes_the_last_counter():
    share = FairShare({})
    served(share, "last", 700)

    share.enter("new")

    assert share.served("new") == 700


def test_a_higher_weight_charges_less_for_the_same_service():
    share = FairShare({"paying": 4.0})
    share.enter("paying")
    share.charge("paying", 400)

    assert share.served("paying") == 100


def test_overcharged_tokens_are_refunded():
    share = FairShare({})
    share.enter("a")
    share.charge("a", 100)
    share.charge("a", -40)

    assert share.served("a") == 60


def test_expected_completion_length_follows_recent_ones_up_to_the_limit():
    share = FairShare({})
    share.enter("a")
    for _ in range(100):
        share.completed("a", 20)

    assert share.expected_tokens_out("a", 0) == pytest.approx(20, abs=1)
    assert share.expected_tokens_out("a", 5) == 5


def test_idle_tenants_are_dropped_beyond_the_maximum():
    share = FairShare({})
    share.enter("waiting")
    share.charge("waiting", 5)

    for number in range(TENANTS_MAX + 10):
        served(share, f"tenant-{number}", number + 100)

    assert len(share._known) <= TENANTS_MAX + 1
    assert share.served("waiting") == 5
    share.charge("tenant-0", 1)  # A forgotten tenant can still be charged.
    share.completed("tenant-0", 1)
