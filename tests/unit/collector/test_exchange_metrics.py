"""What is shown of the KV exchange: leases and reads of each worker, handoffs of each request."""

import msgspec

from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import KvExchangeState
from shared.contracts.workers import FleetState, FleetWorker, KvMemory, KvReadSpeed, Role, WorkerPhase
from shared.telemetry import names
from tests.support.fleet_builders import load, record
from tests.unit.collector.test_fleet_metrics import Shown, metrics, request

D1 = {"worker_id": "d1", "role": "decode"}


def told(epoch: int = 1, **numbers):
    return load("d1", epoch=epoch, role=Role.DECODE, exchange=KvExchangeState(**numbers))


def test_a_workers_present_leases_and_reads_are_shown():
    one = metrics()
    one.load_reported(told(leases=2, pinned_blocks=90, reads=1), 1.0)
    one.load_reported(told(leases=1, pinned_blocks=30), 2.0)
    shown = Shown(one, 2.0)

    assert shown(names.WORKER_LEASES_HELD, **D1) == 1
    assert shown(names.WORKER_PINNED, **D1) == 30
    assert shown(names.WORKER_READS_RUNNING, **D1) == 0


def test_leases_are_counted_by_outcome():
    one = metrics()
    one.load_reported(
        told(
            leases_granted_total=10, leases_released_total=7, leases_expired_total=2, leases_refused_total=3,
            refused_requests_total=4, recomputed_tokens_total=64, first_tokens_received_total=5,
            recompute_slowed_seconds_total=0.25,
        ),
        1.0,
    )  # fmt: skip
    shown = Shown(one, 1.0)

    outcomes = {"granted": 10, "released": 7, "expired": 2, "refused": 3}
    assert {each: shown(names.WORKER_LEASES, outcome=each, **D1) for each in outcomes} == outcomes
    assert shown(names.WORKER_REFUSED, **D1) == 4
    assert shown(names.WORKER_RECOMPUTED, **D1) == 64
    assert shown(names.WORKER_FIRST_TOKENS, **D1) == 5
    assert shown(names.WORKER_RECOMPUTE_SLOWED, **D1) == 0.25


def test_a_failed_read_is_not_counted_as_done():
    one = metrics()
    one.load_reported(told(reads_total=10, reads_failed_total=1), 1.0)
    shown = Shown(one, 1.0)

    assert shown(names.WORKER_READS, outcome="done", **D1) == 9
    assert shown(names.WORKER_READS, outcome="failed", **D1) == 1


def test_the_speed_of_reads_between_registered_workers_is_shown():
    """A worker that names others that do not exist makes no series."""
    one, reads = metrics(), [("p1", 42), ("p1", 41), ("nobody", 7)]
    told = [KvReadSpeed(source_id=WorkerId(source), bytes_per_s=speed, memory=KvMemory.CUDA) for source, speed in reads]
    records = [record("p1", role=Role.PREFILL), record("d1", role=Role.DECODE)]
    records[1] = msgspec.structs.replace(records[1], kv_reads=told)
    workers = [FleetWorker(record=each, phase=WorkerPhase.READY, since_s=1.0, silent_s=0.0) for each in records]
    one.fleet.update(FleetState(leader="o1", term=1, workers=workers), 1.0)
    shown = Shown(one, 1.0)

    assert shown(names.WORKER_KV_READ_SPEED, source="p1", memory="cuda", **D1) == 41
    assert sum(labels[0] == names.WORKER_KV_READ_SPEED.name for labels in shown.samples) == 1


def test_totals_continue_when_an_engine_restarts():
    one = metrics()
    one.load_reported(told(epoch=1, leases_granted_total=10), 1.0)
    one.load_reported(told(epoch=2, leases_granted_total=5), 2.0)

    assert Shown(one, 2.0)(names.WORKER_LEASES, outcome="granted", **D1) == 15


def test_a_worker_without_exchange_reports_shows_no_leases():
    one = metrics()
    one.load_reported(load("d1", role=Role.DECODE), 1.0)
    shown = Shown(one, 1.0)

    assert shown(names.WORKER_PINNED, **D1) is None
    assert shown(names.WORKER_LEASES, outcome="granted", **D1) is None
    assert shown(names.WORKER_RUNNING, **D1) == 0


def test_streamed_and_offered_handoffs_are_counted_separately():
    one = metrics()
    one.request_finished(request(received_tokens=96, streamed_handoff=True, kv_wait_s=0.2, kv_read_s=0.04), 1.0)
    one.request_finished(request(received_tokens=96, kv_wait_s=0.0, kv_read_s=0.02), 1.0)
    one.request_finished(request(received_tokens=96, kv_wait_s=-1.0, kv_read_s=-1.0), 1.0)
    shown = Shown(one, 1.0)

    assert shown(names.FLEET_HANDOFFS, handoff="streamed") == 1
    assert shown(names.FLEET_HANDOFFS, handoff="offered") == 2
    assert shown(names.FLEET_KV_WAIT, "_sum", handoff="streamed") == 0.2
    assert shown(names.FLEET_KV_WAIT, "_count", handoff="offered") == 1
    assert shown(names.FLEET_KV_READ, "_sum", handoff="offered") == 0.02


def test_a_request_without_received_kv_counts_only_recomputed_tokens():
    one = metrics()
    one.request_finished(request(received_tokens=0, recomputed_tokens=100), 1.0)
    one.request_finished(request(received_tokens=64, recomputed_tokens=5, reprefilled_tokens=32), 1.0)
    one.request_finished(request(received_tokens=64, recomputed_tokens=-1, readback_tokens=320), 1.0)
    shown = Shown(one, 1.0)

    assert shown(names.FLEET_HANDOFFS, handoff="offered") == 2
    assert shown(names.FLEET_RECOMPUTED) == 105
    assert shown(names.FLEET_REPREFILLED) == 32
    assert shown(names.FLEET_READBACK) == 320


def test_drafts_are_counted_by_the_handoff_before():
    one = metrics()
    one.request_finished(request(received_tokens=64, drafted_tokens=10, accepted_tokens=9), 1.0)
    one.request_finished(request(received_tokens=0, drafted_tokens=5, accepted_tokens=5), 1.0)
    one.request_finished(request(received_tokens=64, drafted_tokens=3, accepted_tokens=99), 1.0)
    shown = Shown(one, 1.0)

    assert shown(names.FLEET_DRAFTS, handoff="offered", result="accepted") == 12
    assert shown(names.FLEET_DRAFTS, handoff="offered", result="rejected") == 1
    assert shown(names.FLEET_DRAFTS, handoff="none", result="accepted") == 5
    assert shown(names.FLEET_DRAFTS, handoff="streamed", result="accepted") == 0


def test_a_count_that_no_request_has_is_left_out_of_the_totals():
    one = metrics()
    huge = (1 << 63) - 1
    one.request_finished(request(received_tokens=64, recomputed_tokens=huge, readback_tokens=huge), 0.0)
    one.request_finished(request(received_tokens=64, recomputed_tokens=8, readback_tokens=320), 1.0)
    shown = Shown(one, 1.0)

    assert shown(names.FLEET_READBACK) == 320
    assert shown(names.FLEET_RECOMPUTED) == 8
