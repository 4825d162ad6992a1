"""What happens when a process dies."""

from __future__ import annotations

from services.launcher.system.restart import GiveUp, RestartAfter, RestartHistory, RestartPolicy


def test_the_pause_grows_with_each_death_up_to_a_limit():
    history = RestartHistory(RestartPolicy(backoff_s_first=1.0, backoff_s_max=3.0, deaths_max=9))

    pauses = [history.died(now=float(n)) for n in range(4)]

    assert pauses == [RestartAfter(1.0, 1), RestartAfter(2.0, 2), RestartAfter(3.0, 3), RestartAfter(3.0, 4)]


def test_a_process_that_keeps_dying_is_given_up():
    history = RestartHistory(RestartPolicy(deaths_max=3, window_s=60.0))
    history.died(now=0.0)
    history.died(now=1.0)

    assert history.died(now=2.0) == GiveUp(deaths=3, window_s=60.0)


def test_deaths_before_the_window_do_not_count():
    history = RestartHistory(RestartPolicy(deaths_max=2, window_s=60.0, backoff_s_first=0.5))
    history.died(now=0.0)

    assert history.died(now=61.0) == RestartAfter(0.5, 1)
