"""The short form of ``make chaos``: every answer is the right one, or a documented error in time; then all is as before."""

from __future__ import annotations

import pytest

from tests.nightly.chaos.conftest import Stage
from tests.nightly.chaos.faults import WORKERS_ONLY, Fault, Kind, Part
from tests.nightly.chaos.fleet import Skew
from tests.nightly.chaos.trace import Shape

pytestmark = pytest.mark.nats

LOAD_HZ = 6.0


def test_no_request_fails_when_workers_die_and_freeze(stage: Stage):
    shape = Shape(seed=11, seconds=12.0, requests_per_s=LOAD_HZ)

    report = stage.play(stage.run.chaos(shape, every_s=1.2, menu=WORKERS_ONLY))

    assert len(report.happened) >= 2
    assert report.broken_promises() == [], report.summary()
    assert report.failures == []


def test_every_request_ends_rightly_whatever_breaks(stage: Stage):
    shape = Shape(seed=5, seconds=20.0, requests_per_s=LOAD_HZ, batch_every_s=30.0)

    report = stage.play(stage.run.chaos(shape, every_s=1.0))

    assert len({(one.fault.part, one.fault.kind) for one in report.happened}) >= 4
    assert report.broken_promises() == [], report.summary()


def test_a_worker_whose_clock_was_set_back_serves_again(stage: Stage):
    stage.run.fleet.actors["decode-1"].skew = Skew(wall_s=0.0, uptime_s=7e4, set_after_s=0.0, set_by_s=-3600.0)
    kill = Fault(at_s=0.5, kind=Kind.KILL, part=Part.WORKER, target="decode-1", for_s=0.0)

    report = stage.play(stage.run.break_it(Shape(seed=12, seconds=2.0, requests_per_s=LOAD_HZ), [kill]))

    assert report.unsettled == [], report.summary()
