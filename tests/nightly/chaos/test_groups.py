"""Faults in a fleet whose model has windows or recurrent state: what is handed over at boundaries is right, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nightly.chaos.conftest import Stage, staged
from tests.nightly.chaos.faults import WORKERS_ONLY
from tests.nightly.chaos.fleet import Size
from tests.nightly.chaos.trace import Shape

pytestmark = pytest.mark.nats


@pytest.fixture(scope="module", params=["window", "state"])
def grouped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Four workers, a router, an orchestrator and a collector."""
    size = Size(prefill=2, decode=2, both=0, routers=1, orchestrators=1, groups=request.param)
    yield from staged(size, tmp_path_factory.mktemp(request.param))


def test_no_request_fails_when_workers_die_and_freeze(grouped: Stage):
    shape = Shape(seed=53, seconds=12.0, requests_per_s=5.0)

    report = grouped.play(grouped.run.chaos(shape, every_s=1.2, menu=WORKERS_ONLY))

    assert len(report.happened) >= 2
    assert report.broken_promises() == [], report.summary()
    assert report.failures == []
