"""What is shown of stores: what they keep, what they do with files, what they give."""

from shared.contracts.load import StoreState
from shared.contracts.workers import Role
from shared.telemetry import names
from tests.support.fleet_builders import load
from tests.unit.collector.test_fleet_metrics import Shown, metrics

S1 = {"worker_id": "s1"}
BOTH_TIERS = ("host", "disk")


def told(epoch: int = 1, **numbers: int):
    return load("s1", epoch=epoch, role=Role.STORE, store=StoreState(block_bytes=1000, host_blocks_max=64, **numbers))


def test_blocks_bytes_and_capacity_are_shown_for_memory_and_files():
    one = metrics()
    one.load_reported(told(host_blocks=60, disk_blocks=200, disk_blocks_max=256), 1.0)
    one.load_reported(told(host_blocks=64, disk_blocks=210, disk_blocks_max=256), 2.0)
    shown = Shown(one, 2.0)

    assert [shown(names.STORE_BLOCKS, tier=tier, **S1) for tier in BOTH_TIERS] == [64, 210]
    assert [shown(names.STORE_BYTES, tier=tier, **S1) for tier in BOTH_TIERS] == [64_000, 210_000]
    assert [shown(names.STORE_BLOCKS_MAX, tier=tier, **S1) for tier in BOTH_TIERS] == [64, 256]


def test_a_bucket_is_a_tier_of_its_own():
    one = metrics()
    one.load_reported(told(object_blocks=3, object_blocks_max=8, evicted_object_blocks_total=2), 1.0)
    shown = Shown(one, 1.0)

    assert [
        shown(metric, tier="object", **S1)
        for metric in (names.STORE_BLOCKS, names.STORE_BYTES, names.STORE_BLOCKS_MAX, names.STORE_EVICTED)
    ] == [3, 3000, 8, 2]


def test_copies_to_and_from_files_are_shown_with_their_outcome():
    one = metrics()
    one.load_reported(
        told(
            loads_waiting=3, saves_waiting=9, loaded_blocks_total=10, damaged_blocks_total=2, saved_blocks_total=30,
            unsaved_blocks_total=4,
        ),
        1.0,
    )  # fmt: skip
    shown = Shown(one, 1.0)

    assert [shown(names.STORE_WAITING, kind=kind, **S1) for kind in ("load", "save")] == [3, 9]
    ends = {("load", "done"): 10, ("load", "damaged"): 2, ("save", "done"): 30, ("save", "failed"): 4}
    assert {each: shown(names.STORE_MOVED, kind=each[0], outcome=each[1], **S1) for each in ends} == ends


def test_totals_continue_when_a_store_restarts():
    one = metrics()
    numbers = {"evicted_host_blocks_total": 5, "evicted_disk_blocks_total": 1, "granted_bytes_total": 7000}
    one.load_reported(told(epoch=1, **numbers), 1.0)
    one.load_reported(told(epoch=2, **numbers), 2.0)
    shown = Shown(one, 2.0)

    assert [shown(names.STORE_EVICTED, tier=tier, **S1) for tier in BOTH_TIERS] == [10, 2]
    assert shown(names.STORE_GRANTED, **S1) == 14_000


def test_other_workers_have_no_store_metrics():
    one = metrics()
    one.load_reported(load("d1", role=Role.DECODE), 1.0)
    shown = Shown(one, 1.0)

    assert not [name for name, *_labels in shown.samples if name.startswith("baton_store_")]
