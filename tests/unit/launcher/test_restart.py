"""What happens when a process dies."""

from __future__ import annotations

from services.launcher.system.restart import GiveUp, RestartAfter, RestartLedger, RestartPolicy


def test_each_death_makes_the_next_start_wait_longer_up_to_a_limit():
    ledger = RestartLedger(RestartPolicy(backoff_s_first=1.0, backoff_s_max=3.0, deaths_max=9))

    pauses = [ledger.died(now=float(n)) for n in range(4)]

    assert pauses == [RestartAfter(1.0, 1), RestartAfter(2.0, 2), RestartAfter(3.0, 3), RestartAfter(3.0, 4)]


def test_a_process_that_keeps_dying_is_given_up():
    ledger = RestartLedger(RestartPolicy(deaths_max=3, window_s=60.0))
    ledger.died(now=0.0)
    ledger.died(now=1.0)

    assert ledger.died(now=2.0) == GiveUp(deaths=3, window_s=60.0)


def test_deaths_of_long_ago_are_forgiven():
    ledger = RestartLedger(RestartPolicy(deaths_max=2, window_s=60.0, backoff_s_first=0.5))
    ledger.died(now=0.0)

    assert ledger.died(now=61.0) == RestartAfter(0.5, 1)
