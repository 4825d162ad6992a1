"""NATS, orchestrators, collector and routers, each down alone and in turn: the others keep serving, and the system
converges again.
"""

from __future__ import annotations

import pytest

from tests.nightly.chaos.conftest import Stage
from tests.nightly.chaos.faults import Fault, Kind, Part
from tests.nightly.chaos.trace import Shape

pytestmark = pytest.mark.nats

LOAD_HZ = 6.0


def kill(part: Part, target: str, at_s: float, for_s: float = 1.0) -> Fault:
    return Fault(at_s=at_s, kind=Kind.KILL, part=part, target=target, for_s=for_s)


def test_without_orchestrators_and_collector_nothing_fails_even_when_a_worker_dies(stage: Stage):
    faults = [
        kill(Part.ORCHESTRATOR, "orchestrator-1", 0.5, for_s=6.0),
        kill(Part.ORCHESTRATOR, "orchestrator-2", 0.5, for_s=6.0),
        kill(Part.COLLECTOR, "collector", 0.5, for_s=6.0),
        kill(Part.WORKER, "decode-2", 1.5),
        kill(Part.WORKER, "prefill-2", 3.0),
    ]

    report = stage.play(stage.run.break_it(Shape(seed=21, seconds=6.0, requests_per_s=LOAD_HZ), faults))

    assert report.broken_promises() == [], report.summary()
    assert report.failures == []


def test_a_router_that_dies_takes_only_its_own_connections_along(stage: Stage):
    faults = [kill(Part.ROUTER, "router-1", 1.0)]

    report = stage.play(stage.run.break_it(Shape(seed=22, seconds=3.0, requests_per_s=LOAD_HZ), faults))

    assert report.broken_promises() == [], report.summary()
    assert {one.router for one in report.outcomes if not one.is_answered} <= {"router-1"}


def test_routers_restarted_in_turn_cost_no_request_of_clients_that_keep_their_connections(stage: Stage):
    restarts = [
        Fault(at_s=at_s, kind=Kind.RESTART, part=Part.ROUTER, target=router, for_s=0.0)
        for at_s, router in ((1.0, "router-1"), (7.0, "router-2"))
    ]
    shape = Shape(seed=25, seconds=10.0, requests_per_s=LOAD_HZ, kept_share=1.0)

    report = stage.play(stage.run.break_it(shape, restarts))

    assert report.broken_promises() == [], report.summary()
    assert report.failures == []
    assert sum(one.reused for one in report.outcomes) > len(report.outcomes) / 5


@pytest.mark.parametrize("kind", [Kind.KILL, Kind.FORGET, Kind.FREEZE])
def test_nats_that_goes_and_comes_costs_documented_errors_and_nothing_stays(stage: Stage, kind: Kind):
    faults = [Fault(at_s=1.0, kind=kind, part=Part.NATS, target="nats", for_s=1.0)]

    report = stage.play(stage.run.break_it(Shape(seed=23, seconds=4.0, requests_per_s=LOAD_HZ), faults))

    assert report.broken_promises() == [], report.summary()


def test_the_system_recovers_from_each_outage_in_turn(stage: Stage):
    faults = [
        kill(Part.ORCHESTRATOR, "orchestrator-1", 0.5),
        kill(Part.NATS, "nats", 1.5),
        kill(Part.COLLECTOR, "collector", 2.5),
        kill(Part.ROUTER, "router-2", 4.0),
        kill(Part.ORCHESTRATOR, "orchestrator-2", 5.0),
        Fault(at_s=6.0, kind=Kind.FORGET, part=Part.NATS, target="nats", for_s=0.5),
    ]

    report = stage.play(stage.run.break_it(Shape(seed=24, seconds=8.0, requests_per_s=LOAD_HZ), faults))

    assert report.broken_promises() == [], report.summary()
