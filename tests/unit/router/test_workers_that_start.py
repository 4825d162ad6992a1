"""A worker is known before it knows itself, and before it has measured anything."""

from __future__ import annotations

import msgspec

from services.router.core import cost_model
from services.router.core.cluster_view import ClusterView
from services.router.core.placement import Need, Placed, Policy, place
from services.router.core.prefix_index import PrefixIndex
from services.router.core.request import Mode
from shared.contracts.workers import Role, WorkerPhase
from tests.fleet_builders import FINGERPRINT, load, record

UNKNOWN = msgspec.structs.replace(FINGERPRINT, revision="", dtype="")


def test_a_worker_pairs_by_the_fingerprint_that_it_has_when_it_is_ready():
    cluster = ClusterView()
    starting = record("p", WorkerPhase.STARTING, role=Role.PREFILL)
    cluster.record(msgspec.structs.replace(starting, fingerprint=UNKNOWN), now=0.0)
    cluster.record(record("p", role=Role.PREFILL), now=1.0)
    cluster.record(record("d", role=Role.DECODE), now=1.0)

    placed = place(Need(model="m"), cluster, PrefixIndex(), Policy(), now=1.0)

    assert isinstance(placed, Placed)
    assert placed.mode is Mode.DISAGGREGATED


def test_a_worker_that_has_measured_nothing_counts_as_fast_as_its_like():
    cluster = ClusterView()
    cluster.record(record("old"), now=0.0)
    cluster.report(load("old", prefill_tokens_per_s=100_000.0, decode_s_per_token=0.002), now=0.0)

    cluster.record(record("new"), now=1.0)
    cluster.report(load("new"), now=1.0)

    old, new = cluster.workers["old"], cluster.workers["new"]
    assert cost_model.prefill_s(new, 1000) == cost_model.prefill_s(old, 1000)
    assert cost_model.decode_s(new, 1000, 10) == cost_model.decode_s(old, 1000, 10)


def test_a_worker_goes_by_its_own_measures_once_it_has_some():
    cluster = ClusterView()
    for worker_id, speed in (("fast", 1000.0), ("slow", 100.0)):
        cluster.record(record(worker_id), now=0.0)
        cluster.report(load(worker_id, prefill_tokens_per_s=speed), now=0.0)

    assert cost_model.prefill_speed(cluster.workers["fast"]) == 1000.0
    assert cost_model.prefill_speed(cluster.workers["slow"]) == 100.0
