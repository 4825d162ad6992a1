"""What the orchestrator makes of records, load reports and silence."""

from hypothesis import given
from hypothesis import strategies as st

from services.orchestrator.lifecycle import TRANSITIONS, Fleet, Limits
from shared.contracts.workers import WorkerLost, WorkerPhase
from tests.support.fleet_builders import load, record

LIMITS = Limits(silence_s_max=3.0, unregistered_s_max=10.0, remember_s=60.0, unheard_s_max=1.8)


def hearing_fleet(*records, now=0.0):
    fleet = Fleet(LIMITS)
    for each in records:
        fleet.registered(each, now)
    fleet.bus_heard(now)
    return fleet


def tick(fleet, now):
    fleet.bus_heard(now)
    return fleet.tick(now)


def phases(fleet, now=0.0):
    return {worker.record.worker_id: worker.phase for worker in fleet.described(now)}


def test_a_workers_phase_is_that_of_its_record():
    fleet = hearing_fleet(record("w1", WorkerPhase.STARTING), record("w2", WorkerPhase.READY))

    assert phases(fleet) == {"w1": WorkerPhase.STARTING, "w2": WorkerPhase.READY}
    fleet.registered(record("w1", WorkerPhase.READY), 1.0)
    assert phases(fleet)["w1"] is WorkerPhase.READY


def test_a_ready_worker_that_is_silent_for_three_seconds_is_lost_once():
    fleet = hearing_fleet(record())
    fleet.heard(load(), 1.0)

    assert tick(fleet, 3.9) == []
    assert tick(fleet, 4.0) == [WorkerLost(worker_id="w1", epoch=1, silent_s=3.0)]
    assert phases(fleet) == {"w1": WorkerPhase.LOST}
    assert tick(fleet, 5.0) == []


def test_a_silent_worker_without_a_record_is_lost_however_late_one_looks():
    fleet = hearing_fleet(record())
    fleet.heard(load(), 1.0)
    fleet.unregistered("w1", 1.0)

    assert [lost.worker_id for lost in tick(fleet, 20.0)] == ["w1"]


def test_renewing_the_record_is_a_sign_of_life():
    fleet = hearing_fleet(record())
    fleet.registered(record(), 2.5)

    assert tick(fleet, 5.0) == []


def test_a_starting_worker_may_be_silent_while_its_record_lives():
    fleet = hearing_fleet(record(phase=WorkerPhase.STARTING))

    assert tick(fleet, 100.0) == []
    fleet.unregistered("w1", 100.0)
    assert tick(fleet, 109.9) == []
    assert [lost.worker_id for lost in tick(fleet, 110.0)] == ["w1"]


def test_a_new_epoch_replaces_the_old_one_which_is_lost():
    fleet = hearing_fleet(record(epoch=1))

    assert [lost.epoch for lost in fleet.registered(record(epoch=2, phase=WorkerPhase.STARTING), 1.0)] == [1]
    assert phases(fleet) == {"w1": WorkerPhase.STARTING}


def test_a_newer_epochs_load_report_ends_the_old_epoch_before_its_record():
    fleet = hearing_fleet(record(epoch=1))

    assert [lost.epoch for lost in fleet.heard(load(epoch=2), 1.0)] == [1]
    assert fleet.heard(load(epoch=2), 1.1) == []
    assert fleet.registered(record(epoch=2), 1.2) == []
    assert phases(fleet) == {"w1": WorkerPhase.READY}


def test_messages_of_an_older_epoch_are_ignored():
    fleet = hearing_fleet(record(epoch=2))

    assert fleet.registered(record(epoch=1, phase=WorkerPhase.DRAINING), 1.0) == []
    assert fleet.heard(load(epoch=1), 2.9) == []
    assert phases(fleet) == {"w1": WorkerPhase.READY}
    assert len(tick(fleet, 3.0)) == 1


def test_a_draining_worker_that_deletes_its_record_is_gone():
    fleet = hearing_fleet(record())
    fleet.registered(record(phase=WorkerPhase.DRAINING), 1.0)

    assert fleet.unregistered("w1", 2.0) == []
    assert phases(fleet) == {"w1": WorkerPhase.GONE}
    assert tick(fleet, 20.0) == []


def test_a_late_load_report_does_not_revive_a_departed_worker():
    fleet = hearing_fleet(record(phase=WorkerPhase.DRAINING))
    fleet.unregistered("w1", 1.0)

    fleet.heard(load(phase=WorkerPhase.DRAINING), 1.1)

    assert phases(fleet) == {"w1": WorkerPhase.GONE}


def test_a_ready_worker_may_rewrite_its_vanished_record():
    fleet = hearing_fleet(record())
    fleet.unregistered("w1", 1.0)
    for second in range(2, 10):
        fleet.heard(load(), float(second))
        assert tick(fleet, float(second)) == []

    fleet.registered(record(), 9.5)

    assert tick(fleet, 12.0) == []
    assert phases(fleet) == {"w1": WorkerPhase.READY}


def test_a_worker_that_reports_is_not_lost_for_its_missing_record():
    fleet = hearing_fleet(record())
    fleet.unregistered("w1", 0.0)
    for second in range(1, 30):
        assert fleet.heard(load(), float(second)) == []
        assert tick(fleet, float(second)) == []

    assert phases(fleet) == {"w1": WorkerPhase.READY}
    assert len(tick(fleet, 32.0)) == 1


def test_a_lost_worker_that_speaks_again_comes_back():
    fleet = hearing_fleet(record())
    tick(fleet, 3.0)

    fleet.heard(load(), 5.0)

    assert phases(fleet) == {"w1": WorkerPhase.READY}


def test_no_worker_is_lost_while_the_orchestrator_receives_nothing():
    fleet = hearing_fleet(record("w1"), record("w2"))

    assert fleet.tick(30.0) == []

    fleet.bus_heard(30.1)
    fleet.heard(load("w1"), 32.0)
    assert [lost.worker_id for lost in tick(fleet, 33.0)] == ["w2"]


def test_lost_workers_are_remembered_for_a_minute():
    fleet = hearing_fleet(record())
    tick(fleet, 3.0)

    assert fleet.losses(62.0) == [WorkerLost(worker_id="w1", epoch=1, silent_s=62.0)]
    tick(fleet, 63.0)
    assert phases(fleet) == {}
    assert fleet.losses(63.0) == []


def test_each_published_change_raises_the_revision():
    fleet = hearing_fleet(record())
    before = fleet.revision
    fleet.heard(load(running=3), 1.0)
    fleet.registered(record(), 1.0)
    assert fleet.revision == before

    fleet.registered(record(phase=WorkerPhase.DRAINING), 1.5)
    assert fleet.revision > before


def test_load_and_silence_are_described():
    fleet = hearing_fleet(record())
    fleet.heard(load(running=2, waiting=1, kv_tokens_used=25, kv_tokens_total=100), 1.0)

    (worker,) = fleet.described(1.5)

    assert (worker.running, worker.waiting, worker.kv_used, worker.silent_s, worker.since_s) == (2, 1, 0.25, 0.5, 1.5)


SAID = st.sampled_from([phase for phase in WorkerPhase if phase is not WorkerPhase.LOST])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["registered", "unregistered", "heard", "tick", "deaf tick"]),
        st.sampled_from(["w1", "w2"]),
        st.integers(1, 3),
        SAID,
        st.floats(0.0, 5.0),
    ),
    max_size=60,
)


@given(STEPS)
def test_epochs_never_decrease_and_no_epoch_is_lost_twice(steps):
    fleet, now, epochs, lost_now = Fleet(LIMITS), 0.0, {}, set()
    for what, worker_id, epoch, phase, seconds in steps:
        now += seconds
        match what:
            case "registered":
                losses = fleet.registered(record(worker_id, phase, epoch), now)
            case "unregistered":
                losses = fleet.unregistered(worker_id, now)
            case "heard":
                losses = fleet.heard(load(worker_id, epoch, phase), now)
            case "tick":
                losses = tick(fleet, now)
            case _:
                losses = fleet.tick(now)
        for lost in losses:
            assert (lost.worker_id, lost.epoch) not in lost_now
            assert lost.silent_s >= 0.0
            lost_now.add((lost.worker_id, lost.epoch))
        seen = {worker.record.worker_id: worker for worker in fleet.described(now)}
        for name, worker in seen.items():
            assert worker.record.epoch >= epochs.get(name, 0)
            assert worker.phase in WorkerPhase
            if worker.phase is not WorkerPhase.LOST:
                lost_now.discard((name, worker.record.epoch))
        epochs = {name: worker.record.epoch for name, worker in seen.items()}


def test_every_phase_but_the_end_has_a_way_out():
    assert {phase for phase, _event in TRANSITIONS} == set(WorkerPhase)
