"""Every part of ``bench.bench_scale`` runs, on a small fleet; its figures mean nothing here."""

from __future__ import annotations

import pytest

from bench.bench_scale import ROUTERS, TINY, Served, measure_placement, measure_routers, measure_upkeep, relative
from bench.peer_checks import RunFailed
from bench.scale_fleet import PlayedWorker, xor_of
from services.router.state.prefix_index import PrefixIndex
from shared.contracts.workers import Role

pytestmark = pytest.mark.slow


def test_placements_are_timed_in_a_router_that_knows_the_fleet():
    rows = measure_placement(TINY, "apart", TINY.workers)

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


def test_the_router_that_is_full_first_bounds_the_throughput():
    alone = Served("alone", 1, each_us=[[200.0], [220.0], [180.0]], spread=[[9], [9], [9]])
    beside = Served("beside", 1, each_us=[[205.0]], heard_us=[5.0], spread=[[9]])
    shared = Served("shared", 4, each_us=[[250.0] * 4], spread=[[30, 20, 25, 25]])

    said = relative(alone, beside, shared)

    assert said["cost"] == pytest.approx(200 / 220)
    assert said["uneven"] == pytest.approx(200 / 220 / 0.3)
    assert said["even"] == pytest.approx(4 * 200 / 220)
    assert said["all_serve_uneven"] == pytest.approx(200 / 250 / 0.3)


def test_a_played_worker_sends_digests_of_what_it_holds():
    worker, index = PlayedWorker(1, Role.BOTH, "r"), PrefixIndex()
    index.join(worker.worker_id, 1)
    assert index.restore(worker.snapshot())
    for _ in range(100):
        assert not index.apply(worker.computed(3))
    digest = worker.report().digest

    assert digest is not None
    assert not index.check(worker.worker_id, 1, digest)
    assert index.count(worker.worker_id) == digest.count
    assert digest.xor == xor_of(worker.snapshot().hashes)
