"""Load reports and the reports of legs become what placement reckons with."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from prometheus_client import generate_latest

from services.router.state import fleet_table as t
from services.router.state.engine_speed import EngineSpeed
from services.router.state.speed_samples import Measurements
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import LegReport
from shared.contracts.kv_exchange import KvLedgerState, KvRead, KvTransferReport
from shared.contracts.load import StepTotals
from tests.support.fleet_builders import load, record
from tests.support.system import Metrics
from tests.unit.router.fake_worker import DONE, SSE
from tests.unit.router.world import in_world, prompt, settle

W1, W2 = WorkerId("w1"), WorkerId("w2")
FIRST = Epoch(1)
DECODED = StepTotals(seconds=1.0, decode_steps=100, decode_requests=100, decode_context_tokens=10_000)
"""Ten milliseconds for a step."""
PREFILLED = StepTotals(seconds=1.0, prefill_steps=5, prefill_tokens=10_000, prefill_pairs=1e7)


def fleet(*worker_ids: str) -> Measurements:
    made = Measurements()
    for worker_id in worker_ids:
        made.joined(record(worker_id))
    return made


def transfer_report(**read) -> LegReport:
    values = {"worker_id": W2, "epoch": FIRST, "tokens": 1000, **read}
    return LegReport(kv=KvTransferReport(reads=[KvRead(**values)]))


def test_a_load_report_that_tells_of_steps_is_answered_with_what_it_teaches():
    known = fleet("w1").load(load("w1", steps=DECODED))

    assert known is not None
    assert known.decode_base_s == pytest.approx(0.01, rel=0.2)


def test_a_load_report_with_nothing_new_is_not_answered():
    measurements = fleet("w1")
    measurements.load(load("w1", steps=DECODED))

    assert measurements.load(load("w1", steps=DECODED)) is None
    assert measurements.load(load("w1")) is None


def test_reports_of_strangers_and_of_earlier_lives_teach_nothing():
    measurements = fleet("w1")

    assert measurements.load(load("w2", steps=DECODED)) is None
    assert measurements.load(load("w1", epoch=2, steps=DECODED)) is None
    assert measurements.leg(W2, FIRST, transfer_report(asked_at=1.0, ended_at=2.0), 1.0) is None
    assert measurements.leg(W1, Epoch(0), transfer_report(asked_at=1.0, ended_at=2.0), 1.0) is None


def test_a_new_life_of_a_worker_begins_with_what_its_like_have_shown():
    measurements = fleet("w1")
    learned = measurements.load(load("w1", steps=DECODED))

    again = measurements.joined(record("w1", epoch=2))

    assert again is not None
    assert learned is not None
    assert again.decode_base_s == learned.decode_base_s
    assert measurements.load(load("w1", epoch=1, steps=DECODED)) is None


def test_a_worker_that_measured_nothing_hears_of_its_like_with_its_next_report():
    measurements = fleet("w1", "w2")
    learned = measurements.load(load("w1", steps=DECODED))

    assert measurements.load(load("w2")) == learned
    assert measurements.load(load("w2")) is None


def test_workers_of_other_fingerprints_are_not_alike():
    measurements = fleet("w1")
    measurements.load(load("w1", steps=DECODED))

    stranger = measurements.joined(record("w2", connector="other"))

    assert stranger is not None
    assert stranger.decode_base_s == pytest.approx(EngineSpeed().decode_base_s)


def test_a_record_that_comes_again_is_answered_with_what_is_known():
    measurements = fleet("w1")
    learned = measurements.load(load("w1", steps=DECODED))

    assert measurements.joined(record("w1")) == learned


def test_a_worker_that_is_gone_is_forgotten_but_not_what_it_taught():
    measurements = fleet("w1")
    learned = measurements.load(load("w1", steps=DECODED))
    measurements.gone(W1)

    assert measurements.known() == {}
    assert measurements.joined(record("w3")) == learned


def test_reading_is_learned_from_the_ask_to_the_last_byte():
    known = fleet("w1").leg(
        W1, FIRST, transfer_report(asked_at=5.0, granted_at=5.1, read_at=5.2, ended_at=5.5, read_s=0.3), None
    )

    assert known is not None
    assert known.transfer_base_s + 1000 * known.transfer_s_per_token == pytest.approx(0.5, rel=0.15)


def test_of_a_prompt_that_was_followed_only_the_reading_counts():
    read = transfer_report(asked_at=5.0, granted_at=5.1, read_at=5.2, ended_at=9.0, read_s=0.3, followed=True)
    known = fleet("w1").leg(W1, FIRST, read, None)

    assert known is not None
    assert 1000 * known.transfer_s_per_token == pytest.approx(0.3, rel=0.15)


@pytest.mark.parametrize(
    "read",
    [
        {"asked_at": 5.0, "ended_at": 0.0},
        {"asked_at": 5.0, "ended_at": 6.0, "tokens": 0},
        {"asked_at": 5.0, "ended_at": 6.0, "failure": "the holder died"},
    ],
    ids=["never ended", "nothing came", "failed"],
)
def test_reads_that_did_not_go_well_teach_nothing(read):
    assert fleet("w1").leg(W1, FIRST, transfer_report(**read), None) is None


def test_an_engine_whose_connector_does_not_tell_is_learned_from_its_totals():
    measurements = fleet("w1")
    known = measurements.load(load("w1", received_tokens_total=100_000, received_seconds_total=10.0))

    assert known is not None
    assert known.transfer_s_per_token == pytest.approx(1e-4, rel=0.1)


def test_an_engine_whose_connector_tells_is_not_learned_from_its_totals():
    measurements = fleet("w1")
    told = load("w1", received_tokens_total=100_000, received_seconds_total=10.0, exchange=KvLedgerState())
    before = measurements.known()[W1]

    measurements.load(told)

    assert measurements.known()[W1] == before


def test_the_way_is_what_the_engine_did_not_have_of_the_time_to_the_first_token():
    measurements = fleet("w1")
    report = LegReport(queue_s=0.2, prefill_s=0.3)
    for _ in range(50):
        measurements.leg(W1, FIRST, report, 0.507)

    assert measurements.known()[W1].way_s == pytest.approx(0.007)


@pytest.mark.parametrize("first_token_s", [None, 0.0, -3.0])
def test_a_first_token_that_was_not_seen_says_nothing_of_the_way(first_token_s):
    measurements = fleet("w1")
    before = measurements.known()[W1]

    measurements.leg(W1, FIRST, LegReport(queue_s=0.2, prefill_s=0.3), first_token_s)

    assert measurements.known()[W1] == before


def test_what_is_learned_arrives_where_placement_looks():
    async def story(world):
        worker = await world.worker("w1")
        await worker.report(steps=PREFILLED)
        await settle()
        cluster = world.router.fleet.cluster
        row = cluster.workers[W1].row
        first = cluster.table.numbers[t.PREFILL_S_PER_TOKEN, row]
        await worker.join()  # the record is renewed now and then
        await settle()

        assert first == cluster.table.numbers[t.PREFILL_S_PER_TOKEN, row] < 1.2e-4

    in_world(story)


def test_a_leg_that_ended_well_teaches_what_it_measured():
    async def half_a_second(_worker, _start, frames):
        await asyncio.sleep(0.5)
        frames.head(200, SSE)
        frames.data(DONE, [1])
        frames.end(LegReport(prompt_tokens=9, completion_tokens=1, queue_s=0.1, prefill_s=0.3))

    async def story(world):
        await world.worker("w1", script=half_a_second)
        for _ in range(60):
            await world.ask(prompt(stream=True))

        way_s = world.router.speeds.learned()[W1].way_s
        assert way_s == pytest.approx(0.1, rel=0.2)

    in_world(story)


def test_coefficients_of_a_report_do_not_depend_on_names_of_workers():
    one = fleet("w1").load(load("w1", steps=DECODED))
    other = fleet("w2").load(load("w2", steps=msgspec.structs.replace(DECODED)))

    assert one == other


def test_metrics_tell_what_was_learned_and_how_good_predictions_are():
    async def a_second(_worker, _start, frames):
        await asyncio.sleep(1.0)
        frames.head(200, SSE)
        frames.data(DONE, [1])
        frames.end(LegReport(prompt_tokens=9, completion_tokens=1, queue_s=0.1, prefill_s=0.9, first_token_s=1.0))

    async def story(world):
        worker = await world.worker("w1", script=a_second)
        await worker.report(steps=DECODED)
        await world.ask(prompt(stream=True))

        metrics = Metrics(generate_latest(world.router.registry).decode())
        known = metrics.sum("baton_router_learned_seconds", worker_id="w1", coefficient="decode_base_s")
        assert known == pytest.approx(0.01, rel=0.2)
        ratio = "baton_router_predicted_to_measured_ttft_ratio"
        assert metrics.sum(f"{ratio}_count", mode="aggregated") == 1
        assert metrics.sum(f"{ratio}_bucket", mode="aggregated", le="0.1") == 1

    in_world(story)
