"""After an outage the fleet counts as known once its workers are heard again."""

from __future__ import annotations

from services.router.admission.bus_health import RETURN_S_MAX, BusHealth
from services.router.state.cluster_view import ClusterView
from shared.contracts.ids import WorkerId
from tests.support.fake_clock import FakeClock
from tests.support.fleet_builders import load, record
from tests.support.memory_bus import MemoryBus, MemoryHub

W1 = WorkerId("w1")


def bus_health_of_one_worker() -> tuple[BusHealth, MemoryBus, ClusterView, FakeClock]:
    bus, cluster, clock = MemoryBus(MemoryHub()), ClusterView(), FakeClock()
    cluster.record(record(W1), clock.now())
    return BusHealth(bus, cluster, clock), bus, cluster, clock


async def test_after_an_unannounced_reconnect_the_fleet_counts_as_unknown():
    bus_health, bus, _cluster, clock = bus_health_of_one_worker()
    bus.lose()
    clock.advance(RETURN_S_MAX + 1.0)

    bus.connected = True

    assert not bus_health.reachable


async def test_the_fleet_returns_once_workers_reported_or_expired():
    bus_health, bus, cluster, clock = bus_health_of_one_worker()
    bus.lose()
    bus.restore()
    assert not bus_health.reachable

    cluster.report(load(W1), clock.now())
    assert bus_health.reachable

    bus.lose()
    bus.restore()
    clock.advance(RETURN_S_MAX)
    assert bus_health.reachable
