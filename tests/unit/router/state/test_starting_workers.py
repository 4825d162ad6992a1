"""The router handles workers without a fingerprint or measurements, and such whose engine is silent."""

from __future__ import annotations

import msgspec

from services.router.placement.placement import Placement, PlacementPolicy, PlacementRequest
from services.router.placement.placer import CostPlacer
from services.router.request.facts import Mode
from services.router.state import fleet_table
from services.router.state.cluster_view import ClusterView
from services.router.state.prefix_index import PrefixIndex
from services.router.state.worker_speed import WorkerSpeed
from shared.contracts.ids import WorkerId
from shared.contracts.load import ENGINE_SILENT_S_MAX
from shared.contracts.workers import Role, WorkerPhase
from tests.support.fleet_builders import FINGERPRINT, load, record

FAST = WorkerSpeed(prefill_token_s=0.001, decode_step_s=0.002)
SLOW = WorkerSpeed(prefill_token_s=0.1, decode_step_s=0.02)
UNKNOWN = msgspec.structs.replace(FINGERPRINT, revision="", dtype="")


def test_a_worker_pairs_by_its_fingerprint_once_ready():
    cluster = ClusterView()
    starting = record("p", WorkerPhase.STARTING, role=Role.PREFILL)
    cluster.record(msgspec.structs.replace(starting, fingerprint=UNKNOWN), now=0.0)
    cluster.record(record("p", role=Role.PREFILL), now=1.0)
    cluster.record(record("d", role=Role.DECODE), now=1.0)

    placement = CostPlacer(cluster, PrefixIndex(), PlacementPolicy()).place(PlacementRequest(model="m"), 1.0)

    assert isinstance(placement, Placement)
    assert placement.mode is Mode.DISAGGREGATED


def test_a_worker_uses_its_own_measurements_once_available():
    cluster = ClusterView()
    for worker_id, speed in (("fast", FAST), ("slow", SLOW)):
        cluster.record(record(worker_id), now=0.0)
        cluster.set_speed(WorkerId(worker_id), speed)

    assert written(cluster, "fast") == list(msgspec.structs.astuple(FAST))
    assert written(cluster, "slow") == list(msgspec.structs.astuple(SLOW))


def test_a_worker_whose_engine_is_silent_gets_no_requests_until_it_answers():
    cluster = ClusterView()
    placer = CostPlacer(cluster, PrefixIndex(), PlacementPolicy())
    for worker_id in ("silent", "other"):
        cluster.record(record(worker_id), now=0.0)

    def chosen(silent_s: float, other: WorkerPhase = WorkerPhase.READY) -> str:
        cluster.report(load("silent", engine_silent_s=silent_s), 1.0)
        cluster.report(load("other", phase=other, running=9), 1.0)
        placement = placer.place(PlacementRequest(model="m"), 1.0)
        return placement.decode.record.worker_id if isinstance(placement, Placement) else ""

    assert chosen(ENGINE_SILENT_S_MAX) == "silent"
    assert chosen(ENGINE_SILENT_S_MAX + 1) == "other"
    assert chosen(ENGINE_SILENT_S_MAX + 1, WorkerPhase.DRAINING) == ""
    assert chosen(0.0) == "silent"


def written(cluster: ClusterView, worker_id: str) -> list[float]:
    return cluster.table.numbers[fleet_table.SPEED :, cluster.workers[WorkerId(worker_id)].row].tolist()
