"""Placement uses published engine speeds and the router's own measurements."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import msgspec
import pytest
from prometheus_client import generate_latest

from services.router.state import fleet_table as t
from services.router.state.cluster_view import ClusterView
from services.router.state.worker_speed import TOKEN_BYTES, WorkerSpeed
from services.router.state.worker_speeds import UNUSED_SWEEPS_MAX, RunningMedian, SpeedOf, WorkerSpeeds
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import LegReport
from shared.contracts.kv_exchange import KvExchangeState, KvRead, KvTransferReport
from shared.contracts.load import EngineSpeed
from shared.contracts.workers import KvMemory, KvReadSpeed
from shared.engine_speed.steps import DEFAULT_STEP_TIMES, StepTimeModel
from tests.support.fleet_builders import load, record
from tests.support.system import Metrics
from tests.unit.router.fake_worker import DONE, SSE
from tests.unit.router.world import in_world, prompt, settle

W1, W2 = WorkerId("w1"), WorkerId("w2")
FIRST = Epoch(1)
MEASURED = EngineSpeed(
    **DEFAULT_STEP_TIMES._replace(decode_step_s=0.01, prefill_token_s=1e-4)._asdict(),
    prefill_samples=20.0,
    decode_samples=20.0,
    batch_spread=0.1,
    pairs_per_token=500.0,
)
PREFILL_ONLY = msgspec.structs.replace(MEASURED, prefill_token_s=1e-3, decode_step_s=0.5, decode_samples=0.0)


class Fleet:
    """Workers of one fingerprint, and the speeds that the router assumes for them."""

    def __init__(self, *worker_ids: str) -> None:
        self.cluster = ClusterView()
        self.speeds = WorkerSpeeds(self.cluster)
        for worker_id in worker_ids:
            self.join(worker_id)

    def join(self, worker_id: str, *, said: dict | None = None, **facts) -> None:
        """``said``: further fields of the record."""
        made = msgspec.structs.replace(record(worker_id, **facts), **said or {})
        self.cluster.record(made, 0.0)
        self.speeds.joined(made)

    def report(self, worker_id: str, **numbers) -> WorkerSpeed:
        self.speeds.load(load(worker_id, **numbers))
        return self.of(worker_id)

    def leg(self, report: LegReport, first_token_s: float | None = None, *, epoch: int = 1) -> WorkerSpeed:
        self.speeds.leg_ended(W1, Epoch(epoch), report, first_token_s)
        return self.of("w1")

    def of(self, worker_id: str) -> WorkerSpeed:
        """The speed that placement reads."""
        row = self.cluster.workers[WorkerId(worker_id)].row
        return WorkerSpeed(
            **dict(zip(WorkerSpeed.__struct_fields__, self.cluster.table.numbers[t.SPEED :, row].tolist(), strict=True))
        )


def transfer_report(**read) -> LegReport:
    values = {"worker_id": W2, "epoch": FIRST, "tokens": 1000, **read}
    return LegReport(kv=KvTransferReport(reads=[KvRead(**values)]))


def test_placement_uses_the_published_speed():
    speed = Fleet("w1").report("w1", speed=MEASURED)

    assert (speed.decode_step_s, speed.prefill_token_s, speed.pairs_per_token) == (0.01, 1e-4, 500.0)


def test_what_a_prompt_step_takes_is_known_once_prompts_were_measured():
    fleet = Fleet("w1")

    def prompt_step_s() -> float:
        return fleet.cluster.table.prompt_step_s(fleet.cluster.workers[W1].row)

    fleet.report("w1", speed=msgspec.structs.replace(MEASURED, prefill_samples=0.0))
    assert prompt_step_s() == 0.0
    fleet.report("w1", speed=MEASURED)
    assert prompt_step_s() > 0.0


def test_default_speeds_hold_until_one_is_published():
    speed = Fleet("w1").report("w1")

    assert speed.prefill_token_s == pytest.approx(DEFAULT_STEP_TIMES.prefill_token_s)
    assert speed.transfer_token_s == pytest.approx(WorkerSpeed().transfer_token_s)
    assert speed.transit_s == WorkerSpeed().transit_s


QWEN3_NEXT = {"kv_token_bytes": 24_576, "kv_boundary_bytes": 38_000_000}


def test_before_a_read_its_time_follows_from_its_bytes_and_the_speed_of_self_tests():
    speeds = [KvReadSpeed(source_id=W2, bytes_per_s=speed, memory=KvMemory.CPU) for speed in (0, 1, 10**9, 10**10)]
    fleet = Fleet()
    fleet.join("w1", said=QWEN3_NEXT | {"kv_reads": speeds})

    speed, unread = fleet.of("w1"), WorkerSpeed()
    assert speed.transfer_token_s == pytest.approx(24_576 / 1e9)
    assert speed.transfer_base_s == pytest.approx(unread.transfer_base_s + 38_000_000 / 1e9)

    fleet.join("w2", said=QWEN3_NEXT)
    assert fleet.of("w2").transfer_base_s == pytest.approx(unread.transfer_base_s + 38_000_000 * 5e-6 / TOKEN_BYTES)


def test_reads_of_some_lengths_tell_what_others_take_of_a_model_with_states():
    """The state comes with each of them, also with those that followed a prefill, without the wait for a grant."""
    fleet = Fleet()
    fleet.join("w1", said=QWEN3_NEXT)
    byte_s = 1e-9
    for tokens in (100, 1000, 4000) * 20:
        read_s = byte_s * (24_576 * tokens + 38_000_000)
        fleet.leg(transfer_report(tokens=tokens, granted_at=5.0, read_s=read_s, ended_at=9.0, followed=True))
        fleet.leg(transfer_report(tokens=tokens, requested_at=5.0, ended_at=5.02 + read_s))

    speed = fleet.of("w1")
    assert speed.transfer_token_s == pytest.approx(24_576 * byte_s, rel=0.1)
    assert speed.transfer_base_s == pytest.approx(0.02 + 38_000_000 * byte_s, rel=0.1)


def test_a_record_that_names_the_sizes_later_changes_the_estimate():
    fleet = Fleet("w1")
    fleet.leg(transfer_report(requested_at=5.0, granted_at=5.1, read_at=5.2, ended_at=5.5, read_s=0.3))
    before = fleet.of("w1")
    fleet.join("w1", said=QWEN3_NEXT)

    assert fleet.of("w1").transfer_base_s > before.transfer_base_s
    assert fleet.of("w1").transfer_token_s < before.transfer_token_s


@pytest.mark.parametrize("wrong", [{"decode_step_s": float("nan")}, {"prefill_token_s": 0.0}, {"batch_spread": -1.0}])
def test_an_invalid_speed_is_ignored(wrong: dict):
    fleet = Fleet("w1")
    before = fleet.report("w1", speed=MEASURED)

    assert fleet.report("w1", speed=msgspec.structs.replace(MEASURED, **wrong)) == before


def test_unknown_workers_and_earlier_epochs_are_ignored():
    fleet = Fleet("w1")
    before = fleet.of("w1")
    fleet.speeds.load(load("w2", speed=MEASURED))
    fleet.speeds.leg_ended(W2, FIRST, transfer_report(requested_at=1.0, ended_at=2.0), 1.0)

    assert fleet.report("w1", epoch=2, speed=MEASURED) == before
    assert fleet.leg(transfer_report(requested_at=1.0, ended_at=2.0), 1.0, epoch=0) == before
    assert list(fleet.speeds.all()) == [W1]


def test_a_new_epoch_starts_with_the_speed_of_similar_workers():
    fleet = Fleet("w1")
    measured = fleet.report("w1", speed=MEASURED)
    fleet.join("w1", epoch=2)

    assert fleet.of("w1") == measured
    assert fleet.report("w1", epoch=1, speed=PREFILL_ONLY) == measured


def test_a_worker_without_a_speed_uses_that_of_similar_ones():
    fleet = Fleet("w1", "w2")
    measured = fleet.report("w1", speed=MEASURED)

    assert fleet.report("w2") == measured
    slower = fleet.report("w1", speed=msgspec.structs.replace(MEASURED, decode_step_s=0.02))
    assert fleet.report("w2") == slower


def test_an_unmeasured_phase_is_taken_from_similar_workers():
    fleet = Fleet("w1", "w2")
    fleet.report("w1", speed=MEASURED)
    speed = fleet.report("w2", speed=PREFILL_ONLY)

    assert (speed.prefill_token_s, speed.decode_step_s) == (1e-3, 0.01)
    assert fleet.of("w1").prefill_token_s == 1e-4
    assert Fleet("w3").report("w3", speed=PREFILL_ONLY).prefill_token_s == 1e-3


def test_workers_of_other_fingerprints_are_not_similar():
    fleet = Fleet("w1")
    fleet.report("w1", speed=MEASURED)
    fleet.join("w2", connector="other")

    assert fleet.of("w2").decode_step_s == pytest.approx(WorkerSpeed().decode_step_s)


def test_a_renewed_record_keeps_the_speed():
    fleet = Fleet("w1")
    measured = fleet.report("w1", speed=MEASURED)
    fleet.join("w1")

    assert fleet.of("w1") == measured


def test_similar_workers_keep_a_departed_workers_speed():
    fleet = Fleet("w1")
    measured = fleet.report("w1", speed=MEASURED)
    fleet.speeds.gone(W1)

    assert fleet.speeds.all() == {}
    fleet.join("w3")
    assert fleet.of("w3") == measured


def test_a_kv_read_lasts_from_request_to_last_byte():
    fleet, read = Fleet("w1"), transfer_report(requested_at=5.0, granted_at=5.1, read_at=5.2, ended_at=5.5, read_s=0.3)
    fleet.leg(read)
    speed = fleet.leg(read)

    assert speed.transfer_base_s + 1000 * speed.transfer_token_s == pytest.approx(0.5, rel=0.15)


def test_a_read_that_follows_a_prefill_counts_only_transfer_time():
    read = transfer_report(requested_at=5.0, granted_at=5.1, read_at=5.2, ended_at=9.0, read_s=0.3, followed=True)

    assert 1000 * Fleet("w1").leg(read).transfer_token_s == pytest.approx(0.3, rel=0.15)


def test_slow_reads_that_follow_a_prefill_say_nothing_of_the_time_to_a_grant():
    """A worker that has read nothing yet is assumed to be as its peers: it would get no leg, and learn nothing."""
    fleet = Fleet("w1", "w2")
    read = transfer_report(requested_at=5.0, granted_at=5.1, read_at=5.2, ended_at=9.0, read_s=2.0, followed=True)
    for _time in range(20):
        fleet.leg(read)

    assert fleet.of("w1").transfer_base_s == pytest.approx(WorkerSpeed().transfer_base_s)
    assert fleet.of("w2").transfer_base_s == pytest.approx(WorkerSpeed().transfer_base_s)


@pytest.mark.parametrize(
    "read",
    [
        {"requested_at": 5.0, "ended_at": 0.0},
        {"requested_at": 5.0, "ended_at": 6.0, "tokens": 0},
        {"requested_at": 5.0, "ended_at": 6.0, "failure": "the holder died"},
        {"requested_at": float("nan"), "ended_at": 6.0},
    ],
    ids=["never ended", "nothing came", "failed", "no time"],
)
def test_failed_reads_do_not_change_the_estimate(read: dict):
    fleet = Fleet("w1")
    before = fleet.of("w1")

    assert fleet.leg(transfer_report(**read)) == before


def test_without_read_reports_the_totals_update_the_estimate():
    speed = Fleet("w1").report("w1", received_tokens_total=100_000, received_seconds_total=10.0)

    assert speed.transfer_token_s == pytest.approx(1e-4, rel=0.1)


def test_with_read_reports_the_totals_are_ignored():
    fleet = Fleet("w1")
    before = fleet.of("w1")

    after = fleet.report("w1", received_tokens_total=100_000, received_seconds_total=10.0, exchange=KvExchangeState())
    assert after == before


def test_transit_is_the_ttft_minus_the_engines_time():
    fleet = Fleet("w1")
    for _ in range(50):
        fleet.leg(LegReport(queue_s=0.2, prefill_s=0.3), 0.507)

    assert fleet.of("w1").transit_s == pytest.approx(0.007)


@pytest.mark.parametrize("first_token_s", [None, 0.0, -3.0])
def test_without_a_first_token_no_transit_is_estimated(first_token_s: float | None):
    fleet = Fleet("w1")
    before = fleet.of("w1")

    assert fleet.leg(LegReport(queue_s=0.2, prefill_s=0.3), first_token_s) == before


def noisy(draw: random.Random, seconds: float) -> float:
    """Measurements on a machine with other load: one in ten is an outlier."""
    seconds *= draw.lognormvariate(0.0, 0.25)
    return seconds * draw.uniform(10, 100) if draw.random() < 0.1 else seconds


@pytest.mark.parametrize("seed", range(4))
def test_transfer_time_estimates_converge_from_noisy_reads(seed: int):
    peers = SpeedOf()
    speed, draw = SpeedOf(peers), random.Random(seed)
    for _ in range(200):
        tokens = round(32 * 500 ** draw.random())
        speed.transfer_took(tokens, noisy(draw, 0.02 + 1e-4 * tokens))

    for known in (speed.now(), SpeedOf(peers).now()):
        for tokens in (64, 512, 4096):
            transfer_s = known.transfer_base_s + known.transfer_token_s * tokens
            assert transfer_s == pytest.approx(0.02 + 1e-4 * tokens, rel=0.35)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 0.0, 1e30])
def test_impossible_durations_change_nothing(seconds: float):
    speed = SpeedOf()
    before = speed.now()

    assert not speed.transfer_took(1000, seconds)
    assert not speed.transfer_took(0, 1.0)
    if not seconds <= 0.0:  # A negative transit counts as the shortest one.
        speed.transit_took(seconds)
    assert speed.now() == before


def test_outliers_do_not_move_the_running_median():
    draw, median = random.Random(5), RunningMedian(1.0)
    for _ in range(400):
        median.learn(noisy(draw, 0.02))

    assert 0.016 < median.seconds < 0.028


def test_the_running_median_does_not_overshoot_a_sample():
    median = RunningMedian(0.002)
    median.learn(0.003)

    assert median.seconds == 0.003


def test_a_slow_moment_of_an_unused_worker_is_forgotten():
    fleet = Fleet("w1", "w2")
    served = LegReport(queue_s=0.0, prefill_s=0.001)
    for _ in range(9):
        fleet.leg(served, 0.9)
    slow = fleet.of("w1").transit_s
    for _ in range(200):  # Legs go elsewhere now.
        fleet.speeds.leg_ended(W2, FIRST, served, 0.004)
    for _ in range(UNUSED_SWEEPS_MAX):
        fleet.speeds.sweep()

    assert slow == fleet.of("w1").transit_s > 5 * fleet.of("w2").transit_s

    fleet.speeds.leg_ended(W2, FIRST, served, 0.004)
    fleet.speeds.sweep()

    assert fleet.of("w1").transit_s == pytest.approx(fleet.of("w2").transit_s, rel=0.1)


def test_what_few_samples_of_a_slow_moment_showed_keeps_no_worker_idle():
    fleet = Fleet("w1", "w2")
    few = msgspec.structs.replace(MEASURED, prefill_step_s=0.2, decode_step_s=0.1, decode_samples=2.0)
    fleet.report("w1", speed=few)
    fleet.report("w2", speed=MEASURED)  # It goes on to work.
    for _ in range(20):
        quick = transfer_report(requested_at=5.0, granted_at=5.0, read_at=5.0, ended_at=5.01, read_s=0.01)
        fleet.speeds.leg_ended(W2, FIRST, quick, None)
    fleet.leg(transfer_report(requested_at=5.0, granted_at=5.1, read_at=5.2, ended_at=6.5, read_s=1.3))
    slow = fleet.of("w1")
    for _ in range(UNUSED_SWEEPS_MAX):
        fleet.speeds.sweep()

    assert fleet.report("w1", speed=few) == slow

    fleet.speeds.sweep()
    fleet.speeds.sweep()

    again = fleet.report("w1", speed=few)  # The same is no news.
    assert StepTimeModel.of(again) == StepTimeModel.of(MEASURED) == StepTimeModel.of(fleet.of("w2"))
    assert again.transfer_base_s < slow.transfer_base_s

    slower = fleet.report("w1", speed=msgspec.structs.replace(few, decode_step_s=0.11))
    assert slower.decode_step_s == 0.11


def test_a_worker_that_has_long_been_slow_is_not_taken_for_a_fast_one():
    fleet = Fleet("w1", "w2")
    fleet.report("w2", speed=MEASURED)
    many = msgspec.structs.replace(MEASURED, decode_step_s=0.1, prefill_samples=900.0, decode_samples=900.0)
    slow = fleet.report("w1", speed=many)
    for _ in range(3 * UNUSED_SWEEPS_MAX):
        fleet.speeds.sweep()

    assert fleet.of("w1").decode_step_s == slow.decode_step_s == 0.1


def test_a_large_fleet_is_not_forgotten_all_at_once():
    names = [f"w{number}" for number in range(10 * UNUSED_SWEEPS_MAX)]
    fleet = Fleet(*names, "w-busy")
    few = msgspec.structs.replace(MEASURED, decode_step_s=0.1, decode_samples=2.0)
    for name in names:
        fleet.report(name, speed=few)
    fleet.report("w-busy", speed=MEASURED)
    slow = []
    for _ in range(2 * UNUSED_SWEEPS_MAX + 2):
        fleet.speeds.sweep()
        slow.append(sum(fleet.of(name).decode_step_s == 0.1 for name in names))

    steps = [before - after for before, after in pairwise([len(names), *slow])]
    assert slow[-1] == 0
    assert max(steps) <= len(names) // UNUSED_SWEEPS_MAX + 1


@in_world()
async def test_a_published_speed_reaches_placement_and_survives_record_renewal(world):
    worker = await world.worker("w1")
    await worker.report(speed=MEASURED)
    await settle()
    cluster = world.router.fleet.cluster
    row = cluster.workers[W1].row
    first = cluster.table.numbers[t.PREFILL_TOKEN_S, row]
    await worker.join()  # Workers renew their record from time to time.
    await settle()

    assert first == cluster.table.numbers[t.PREFILL_TOKEN_S, row] == 1e-4


@in_world()
async def test_finished_legs_update_the_transit_estimate(world):
    async def half_a_second(_worker, _start, frames):
        await asyncio.sleep(0.5)
        frames.head(200, SSE)
        frames.data(DONE, [1])
        frames.end(LegReport(prompt_tokens=9, completion_tokens=1, queue_s=0.1, prefill_s=0.3))

    await world.worker("w1", script=half_a_second)
    for _ in range(60):
        await world.ask(prompt(stream=True))

    assert world.router.speeds.all()[W1].transit_s == pytest.approx(0.1, rel=0.2)


@in_world()
async def test_metrics_show_speeds_and_the_quality_of_predictions(world):
    async def a_second(_worker, _start, frames):
        await asyncio.sleep(1.0)
        frames.head(200, SSE)
        frames.data(DONE, [1])
        frames.end(LegReport(prompt_tokens=9, completion_tokens=1, queue_s=0.1, prefill_s=0.9, first_token_s=1.0))

    worker = await world.worker("w1", script=a_second)
    await worker.report(speed=MEASURED)
    await world.ask(prompt(stream=True))

    metrics = Metrics(generate_latest(world.router.registry).decode())
    known = metrics.sum("baton_router_engine_speed_seconds", worker_id="w1", parameter="decode_step_s")
    assert known == pytest.approx(0.01, rel=0.2)
    ratio = "baton_router_predicted_to_measured_ttft_ratio"
    assert metrics.sum(f"{ratio}_count", mode="aggregated") == 1
    assert metrics.sum(f"{ratio}_bucket", mode="aggregated", le="0.1") == 1
