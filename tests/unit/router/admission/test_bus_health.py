"""After an outage the fleet counts as known once its workers are heard again."""

from __future__ import annotations

from services.router.admission.bus_health import LOOK_S_MAX, RETURN_S_MAX, SILENT_S_MAX, BusHealth
from services.router.state.cluster_view import ClusterView
from shared.contracts.ids import WorkerId
from tests.support.fake_clock import FakeClock
from tests.support.fleet_builders import load, record
from tests.support.memory_bus import MemoryBus, MemoryHub

W1 = WorkerId("w1")
LOOK_S = 0.1
WAIT_S = 5.0


def bus_health_of_one_worker() -> tuple[BusHealth, MemoryBus, ClusterView, FakeClock]:
    bus, cluster, clock = MemoryBus(MemoryHub()), ClusterView(), FakeClock()
    cluster.record(record(W1), clock.now())
    return BusHealth(bus, cluster, clock, wait_s_max=WAIT_S), bus, cluster, clock


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


def look_for(s: float, bus_health: BusHealth, clock: FakeClock) -> None:
    """As the deadline monitor does."""
    for _ in range(round(s / LOOK_S)):
        clock.advance(LOOK_S)
        bus_health.look(clock.now())


async def test_a_silent_nats_counts_as_away_from_its_last_sign():
    bus_health, bus, cluster, clock = bus_health_of_one_worker()
    cluster.report(load(W1), clock.now())
    look_for(1.0, bus_health, clock)
    frozen_at = clock.now()

    bus.hub.freeze()
    look_for(SILENT_S_MAX - LOOK_S, bus_health, clock)
    assert bus_health.reachable
    look_for(2 * LOOK_S, bus_health, clock)

    assert not bus_health.reachable
    assert abs(bus_health.wait_ends(0.0) - (frozen_at + WAIT_S)) <= LOOK_S
    bus.lose()
    assert abs(bus_health.wait_ends(0.0) - (frozen_at + WAIT_S)) <= LOOK_S


async def test_when_a_silent_nats_speaks_again_workers_must_report_first():
    bus_health, bus, cluster, clock = bus_health_of_one_worker()
    cluster.report(load(W1), clock.now())
    bus.hub.freeze()
    look_for(SILENT_S_MAX + 1.0, bus_health, clock)

    bus.hub.thaw()
    look_for(LOOK_S, bus_health, clock)
    assert not bus_health.reachable

    cluster.report(load(W1), clock.now())
    assert bus_health.reachable


async def test_a_router_that_stood_still_itself_does_not_call_nats_silent():
    bus_health, bus, cluster, clock = bus_health_of_one_worker()
    cluster.report(load(W1), clock.now())
    look_for(1.0, bus_health, clock)
    bus.hub.freeze()

    clock.advance(10.0)
    bus_health.look(clock.now())

    assert bus_health.reachable
    assert LOOK_S_MAX < SILENT_S_MAX


async def test_a_router_that_starts_waits_a_moment_for_its_fleet():
    bus, cluster, clock = MemoryBus(MemoryHub()), ClusterView(), FakeClock()
    bus_health = BusHealth(bus, cluster, clock, wait_s_max=WAIT_S)
    assert not bus_health.reachable

    clock.advance(RETURN_S_MAX)

    assert bus_health.reachable
