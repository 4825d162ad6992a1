"""Which workers the launcher starts and which it drains."""

from __future__ import annotations

import pytest

from services.launcher.system.process_plan import ProcessPlan, Stage
from services.launcher.system.scaling import OwnWorker, own_worker, steps_for
from services.launcher.system.supervisor import reset_saved_role
from shared.contracts.planning import ScaleFleet
from shared.contracts.workers import Role, WorkerPhase
from shared.runtime.state_folder import saved_role_file
from tests.support.fleet_builders import record

OWN = [
    OwnWorker("prefill-1", Role.PREFILL),
    OwnWorker("decode-1", Role.DECODE),
    OwnWorker("prefill-2", Role.PREFILL),
    OwnWorker("decode-2", Role.PREFILL),
]
"""The last one has changed its role."""


def request(role: Role, change: int) -> ScaleFleet:
    return ScaleFleet(model="m", role=role, change=change)


def test_workers_start_up_to_the_maximum_and_the_rest_is_refused():
    assert steps_for(request(Role.DECODE, 2), OWN, workers_min=1, workers_max=8).start == 2

    short = steps_for(request(Role.DECODE, 4), OWN, workers_min=1, workers_max=6)
    assert short.start == 2
    assert "--workers-max is 6" in short.refusal


def test_the_newest_workers_of_the_present_role_drain_first():
    assert steps_for(request(Role.PREFILL, -2), OWN, workers_min=1, workers_max=8).stop == ["decode-2", "prefill-2"]
    assert steps_for(request(Role.DECODE, -1), OWN, workers_min=1, workers_max=8).stop == ["decode-1"]


def test_the_minimum_number_of_workers_remains():
    steps = steps_for(request(Role.PREFILL, -3), OWN, workers_min=3, workers_max=8)

    assert steps.stop == ["decode-2"]
    assert "--workers-min is 3" in steps.refusal


def test_leaving_workers_do_not_count():
    leaving = [*OWN[:3], OwnWorker("decode-2", Role.PREFILL, is_leaving=True)]

    assert steps_for(request(Role.PREFILL, -1), leaving, workers_min=1, workers_max=8).stop == ["prefill-2"]
    assert steps_for(request(Role.PREFILL, 1), leaving, workers_min=1, workers_max=4).start == 1


@pytest.mark.parametrize("change", [-1, -2])
def test_workers_of_another_role_remain(change: int):
    steps = steps_for(request(Role.BOTH, change), OWN, workers_min=1, workers_max=8)

    assert not steps.stop
    assert "0 both workers" in steps.refusal


OLD, NEW = "0a" * 20, "1b" * 20


def of_revision(name: str, revision: str, epoch: int, phase: WorkerPhase = WorkerPhase.READY) -> OwnWorker:
    return own_worker(name, Role.DECODE, record(name, phase, epoch, Role.DECODE, revision=revision), is_leaving=False)


def request_of(revision: str, change: int) -> ScaleFleet:
    return ScaleFleet(model="m", revision=revision, role=Role.DECODE, change=change)


def test_new_workers_have_the_revision_of_the_newest_one():
    own = [of_revision("decode-1", NEW, 9), of_revision("decode-2", OLD, 5)]

    assert steps_for(request_of(NEW, 1), own, workers_min=1, workers_max=8).start == 1
    assert steps_for(request_of("", 1), own, workers_min=1, workers_max=8).start == 1
    refused = steps_for(request_of(OLD, 1), own, workers_min=1, workers_max=8)
    assert refused.start == 0
    assert f"revision {NEW[:12]}, not {OLD[:12]}" in refused.refusal


def test_a_request_for_a_revision_waits_until_engines_report_theirs():
    own = [OwnWorker("decode-1", Role.DECODE), of_revision("decode-2", NEW, 5, WorkerPhase.STARTING)]

    refused = steps_for(request_of(NEW, 1), own, workers_min=1, workers_max=8)

    assert refused.start == 0
    assert f"no worker here has reported its revision yet, {NEW[:12]} was requested" in refused.refusal


def test_only_workers_of_the_requested_revision_drain():
    own = [of_revision("decode-1", OLD, 3), of_revision("decode-2", OLD, 4), of_revision("decode-3", NEW, 5)]

    assert steps_for(request_of(OLD, -1), own, workers_min=1, workers_max=8).stop == ["decode-2"]
    assert steps_for(request_of("", -1), own, workers_min=1, workers_max=8).stop == ["decode-3"]
    short = steps_for(request_of(NEW, -2), own, workers_min=1, workers_max=8)
    assert short.stop == ["decode-3"]
    assert f"1 decode workers of revision {NEW[:12]} run here" in short.refusal


def test_a_new_worker_does_not_inherit_a_saved_role(tmp_path):
    kept, other = (saved_role_file(str(tmp_path), name) for name in ("prefill-1", "prefill-2"))
    kept.parent.mkdir()
    kept.touch()
    other.touch()

    reset_saved_role(
        ProcessPlan(name="prefill-1", stage=Stage.WORKERS, command=(), env={"BATON_STATE_DIR": str(tmp_path)})
    )

    assert not kept.exists()
    assert other.exists()
