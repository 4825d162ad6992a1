"""What happens when a process dies."""

from __future__ import annotations

from services.launcher.system.restart import Restart, RestartHistory, RestartPolicy


def test_the_pause_grows_with_each_death_up_to_a_limit():
    history = RestartHistory(RestartPolicy(backoff_s_first=1.0, backoff_s_max=3.0))

    pauses = [history.died(now=float(n)) for n in range(4)]

    assert pauses == [Restart(1.0, 1), Restart(2.0, 2), Restart(3.0, 3), Restart(3.0, 4)]


def test_a_process_that_keeps_dying_is_started_again_for_ever():
    history = RestartHistory(RestartPolicy(backoff_s_max=30.0))

    *_, last = [history.died(now=float(n)) for n in range(5_000)]

    assert last == Restart(30.0, 5_000)


def test_after_a_long_life_the_first_pause_is_the_shortest_again():
    history = RestartHistory(RestartPolicy(settled_s=60.0, backoff_s_first=0.5))
    history.died(now=0.0)
    history.died(now=59.0)

    assert history.died(now=119.0) == Restart(0.5, 1)
