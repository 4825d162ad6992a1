"""Whom the launcher starts and whom it lets go."""

from __future__ import annotations

import pytest

from services.launcher.core.scaling import Own, steps_for
from shared.contracts.planning import ScaleFleet
from shared.contracts.workers import Role

OWN = [
    Own("prefill-1", Role.PREFILL),
    Own("decode-1", Role.DECODE),
    Own("prefill-2", Role.PREFILL),
    Own("decode-2", Role.PREFILL),
]
"""The last one has changed its role."""


def wish(role: Role, change: int) -> ScaleFleet:
    return ScaleFleet(model="m", role=role, change=change)


def test_as_many_start_as_there_is_room_for_and_the_rest_is_refused_in_words():
    assert steps_for(wish(Role.DECODE, 2), OWN, workers_min=1, workers_max=8).start == 2

    short = steps_for(wish(Role.DECODE, 4), OWN, workers_min=1, workers_max=6)
    assert short.start == 2
    assert "--workers-max is 6" in short.refusal


def test_who_came_last_goes_first_by_the_role_that_it_has_now():
    assert steps_for(wish(Role.PREFILL, -2), OWN, workers_min=1, workers_max=8).stop == ["decode-2", "prefill-2"]
    assert steps_for(wish(Role.DECODE, -1), OWN, workers_min=1, workers_max=8).stop == ["decode-1"]


def test_the_least_number_of_workers_stays():
    steps = steps_for(wish(Role.PREFILL, -3), OWN, workers_min=3, workers_max=8)

    assert steps.stop == ["decode-2"]
    assert "--workers-min is 3" in steps.refusal


def test_who_is_leaving_already_counts_no_more():
    leaving = [*OWN[:3], Own("decode-2", Role.PREFILL, is_leaving=True)]

    assert steps_for(wish(Role.PREFILL, -1), leaving, workers_min=1, workers_max=8).stop == ["prefill-2"]
    assert steps_for(wish(Role.PREFILL, 1), leaving, workers_min=1, workers_max=4).start == 1


@pytest.mark.parametrize("change", [-1, -2])
def test_nobody_of_another_role_goes(change: int):
    steps = steps_for(wish(Role.BOTH, change), OWN, workers_min=1, workers_max=8)

    assert not steps.stop
    assert "0 both workers" in steps.refusal
