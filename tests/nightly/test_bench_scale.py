"""Every part of ``bench.bench_scale`` runs, on a small fleet; its figures mean nothing here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.bench_scale import ROUTERS, TINY, measure_placement, measure_routers, measure_upkeep
from bench.peer_checks import RunFailed

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("groups", ["full", "state"])
def test_placements_are_timed_in_a_router_that_knows_the_fleet(groups):
    rows = measure_placement(replace(TINY, groups=groups), "apart", TINY.workers)

    assert [(row.kind, row.sending) for row in rows] == [
        ("one", "quiet"), ("many", "quiet"), ("one", "busy"), ("many", "busy"),
    ]  # fmt: skip
    assert all(len(row.took) == len(row.same) == TINY.placements for row in rows)
    assert all(row.blocks >= TINY.entries for row in rows)


def test_memory_reports_and_events_are_measured():
    upkeep = measure_upkeep(TINY)

    assert upkeep.of("load reports").rates["reports"] > 0
    assert upkeep.of("KV events").rates["removed"] > 0


def test_routers_share_a_port():
    (alone, beside, shared), shares = measure_routers(TINY)

    assert [len(each) for each in shared.spread] == [ROUTERS]
    assert sum(shared.spread[0]) == ROUTERS * TINY.requests
    assert beside.heard_us
    assert len(shares) == TINY.rounds
    assert len(alone.each_us) == 2 * TINY.rounds


def test_a_fleet_that_cannot_send_fast_enough_gives_no_figure():
    with pytest.raises(RunFailed, match="reports a second"):
        measure_upkeep(TINY.__class__(entries=2048, workers=4, placements=1, share_s=0.2, rounds=1, sent_share_min=1e9))
