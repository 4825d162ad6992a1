"""What ``bench.bench_scale`` makes of its measurements, and what its played workers send."""

from __future__ import annotations

import pytest

from bench.bench_scale import TRIES, Served, Size, System, relative
from bench.peer_checks import RunFailed
from bench.scale_fleet import PlayedWorker, xor_of
from services.router.state.prefix_index import PrefixIndex
from shared.contracts.kv_events import KvTier
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


@pytest.mark.parametrize("groups", ["full", "state"])
def test_a_played_worker_sends_digests_of_what_it_holds(groups):
    worker, index = PlayedWorker(1, Role.BOTH, "r", groups), PrefixIndex()
    index.join(worker.worker_id, 1)
    assert index.restore(worker.snapshot())
    for _ in range(100):
        assert not index.apply(worker.computed(3))
    digest = worker.report().digest

    assert digest is not None
    assert not index.check(worker.worker_id, 1, digest)
    assert index.count(worker.worker_id) == digest.count
    snapshot = worker.snapshot()
    assert digest.xor == xor_of(snapshot.hashes) ^ xor_of(snapshot.boundary_hashes, KvTier.BOUNDARY)
    assert bool(snapshot.boundary_hashes) == (groups == "state")


def test_a_played_worker_with_states_makes_use_of_a_prompt_up_to_a_boundary():
    full, states = (PlayedWorker(1, Role.BOTH, "r", groups) for groups in ("full", "state"))
    for worker in (full, states):
        worker.prompts.update(range(8))
        worker.ends.update({4, 7})

    assert [full.cached(range(8), tokens) for tokens in (129, 128, 16)] == [128, 112, 0]
    assert [states.cached(range(8), tokens) for tokens in (129, 128, 16)] == [128, 80, 0]


class PlayedFleet:
    """Counts as if it had sent, in each second in turn, so many reports."""

    def __init__(self, *reports: int) -> None:
        self._reports = list(reports)
        self._counts = dict.fromkeys(("at", "reports", "batches", "blocks", "removed", "records"), 0)
        self._is_asked_before = True

    def ask(self, what: str, **_given: object) -> dict[str, int]:
        if what == "counts":
            if not self._is_asked_before:
                self._counts["at"] += 1
                self._counts["reports"] += self._reports.pop(0)
            self._is_asked_before = not self._is_asked_before
        return dict(self._counts)


def fleet_of_ten(*reports: int) -> System:
    system = System(Size(), "both", 10)
    system.fleet = PlayedFleet(*reports)
    return system


def test_what_was_measured_while_the_fleet_sent_too_little_is_measured_again():
    measured = iter(("while it was slow", "while it was not"))

    said, rates = fleet_of_ten(90, 100).while_sending((10.0, 0.0), 0.0, lambda: next(measured))

    assert said == "while it was not"
    assert rates["reports"] == 100


def test_a_fleet_that_never_sends_enough_gives_no_figure():
    with pytest.raises(RunFailed, match="90 reports a second were sent, fewer than 97, 3 times"):
        fleet_of_ten(*[90] * TRIES).while_sending((10.0, 0.0), 0.0, lambda: None)
