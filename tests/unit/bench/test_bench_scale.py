"""What ``bench.bench_scale`` makes of its measurements, and what its played workers send."""

from __future__ import annotations

import pytest

from bench.bench_scale import Served, relative
from bench.scale_fleet import PlayedWorker, xor_of
from services.router.state.prefix_index import PrefixIndex
from shared.contracts.workers import Role


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
