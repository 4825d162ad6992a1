"""Faults in a fleet whose addresses are IPv6, on a cluster of three nats-servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nightly.chaos.conftest import Stage, staged
from tests.nightly.chaos.faults import Fault, Kind, Part
from tests.nightly.chaos.fleet import Size
from tests.nightly.chaos.trace import Shape

pytestmark = pytest.mark.nats

SIZE = Size(prefill=1, decode=1, both=1, orchestrators=1, nats_nodes=3, host="::1")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Three workers, two routers, an orchestrator and a collector."""
    yield from staged(SIZE, tmp_path_factory.mktemp("other"))


def test_each_server_of_a_nats_cluster_may_die_in_turn_and_no_request_is_lost(other: Stage):
    faults = [
        Fault(at_s=at_s, kind=Kind.KILL, part=Part.NODE, target=node, for_s=1.0)
        for at_s, node in ((1.0, "nats-1"), (5.0, "nats-2"), (9.0, "nats-3"))
    ]

    report = other.play(other.run.break_it(Shape(seed=31, seconds=11.0, requests_per_s=4.0), faults))

    assert report.broken_promises() == [], report.summary()
    assert report.failures == []
