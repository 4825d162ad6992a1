"""Whom the launcher starts and whom it lets go."""

from __future__ import annotations

import pytest

from services.launcher.system.plan import ProcessPlan, Stage
from services.launcher.system.scaling_steps import Own, own_of, steps_for
from services.launcher.system.system import begin_anew
from shared.contracts.planning import ScaleFleet
from shared.contracts.workers import Role, WorkerPhase
from shared.runtime.saved_role import saved_role_file
from tests.support.fleet_builders import record

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


OLD, NEW = "0a" * 20, "1b" * 20


def of_revision(name: str, revision: str, epoch: int, phase: WorkerPhase = WorkerPhase.READY) -> Own:
    return own_of(name, Role.DECODE, record(name, phase, epoch, Role.DECODE, revision=revision), is_leaving=False)


def wish_of(revision: str, change: int) -> ScaleFleet:
    return ScaleFleet(model="m", revision=revision, role=Role.DECODE, change=change)


def test_more_workers_are_started_of_the_revision_that_whoever_came_last_is_of():
    own = [of_revision("decode-1", NEW, 9), of_revision("decode-2", OLD, 5)]

    assert steps_for(wish_of(NEW, 1), own, workers_min=1, workers_max=8).start == 1
    assert steps_for(wish_of("", 1), own, workers_min=1, workers_max=8).start == 1
    refused = steps_for(wish_of(OLD, 1), own, workers_min=1, workers_max=8)
    assert refused.start == 0
    assert f"of revision {NEW[:12]}, not {OLD[:12]}" in refused.refusal


def test_a_revision_that_no_engine_has_said_yet_is_not_known_to_be_the_one():
    own = [Own("decode-1", Role.DECODE), of_revision("decode-2", NEW, 5, WorkerPhase.STARTING)]

    refused = steps_for(wish_of(NEW, 1), own, workers_min=1, workers_max=8)

    assert refused.start == 0
    assert f"no worker that runs here says yet whether it is of revision {NEW[:12]}" in refused.refusal


def test_only_workers_of_the_revision_go():
    own = [of_revision("decode-1", OLD, 3), of_revision("decode-2", OLD, 4), of_revision("decode-3", NEW, 5)]

    assert steps_for(wish_of(OLD, -1), own, workers_min=1, workers_max=8).stop == ["decode-2"]
    assert steps_for(wish_of("", -1), own, workers_min=1, workers_max=8).stop == ["decode-3"]
    short = steps_for(wish_of(NEW, -2), own, workers_min=1, workers_max=8)
    assert short.stop == ["decode-3"]
    assert f"1 decode workers of revision {NEW[:12]} run here" in short.refusal


def test_a_worker_that_is_started_anew_has_no_role_of_an_earlier_one_of_its_name(tmp_path):
    kept, other = (saved_role_file(str(tmp_path), name) for name in ("prefill-1", "prefill-2"))
    kept.parent.mkdir()
    kept.touch()
    other.touch()

    begin_anew(ProcessPlan(name="prefill-1", stage=Stage.WORKERS, command=(), env={"BATON_STATE_DIR": str(tmp_path)}))

    assert not kept.exists()
    assert other.exists()
