"""What the console shows is true of what was told, and what it tells anew is what has changed."""

import msgspec
import pytest

from services.collector.console.events import EVENTS_MAX
from services.collector.console.requests import REQUESTS_MAX, SAMPLES_MIN
from services.collector.console.state import Console, Moment, changes
from services.collector.console.traffic import FLOWS_MAX, TENANTS_MAX
from services.collector.metrics.exposition import BOUNDS
from services.collector.metrics.fleet_metrics import STALE_S_MAX, Ledger
from shared.contracts.control import ServicePhase
from shared.contracts.fleet_orders import WorkerDrained
from shared.contracts.inference import KvMoved
from shared.contracts.planning import Demand, PlanAction, PlanDecision
from shared.contracts.workers import Role, WorkerLost, WorkerPhase
from tests.support.fleet_builders import load, record
from tests.unit.collector.console_worlds import PARTS, finished, fleet, service

P1, D1 = record("p1", role=Role.PREFILL), record("d1", role=Role.DECODE)


class Told:
    """A console that is told things at moments of the test's choosing."""

    def __init__(self):
        self.ledger = Ledger(BOUNDS, 0.0)
        self.console = Console(self.ledger, 0.0)
        self.now = 0.0

    @property
    def moment(self):
        return Moment(self.now, 1_000_000.0 + self.now)

    def page(self, *, connected=True):
        return self.console.page(self.moment, connected=connected)

    def fleet(self, *workers, **which):
        self.ledger.fleet.told(fleet(*workers, **which), self.now)
        self.console.fleet_told(self.moment)

    def finish(self, *requests):
        self.console.requests_finished(requests, self.moment)

    def load(self, *args, **numbers):
        self.ledger.load_reported(load(*args, **numbers), self.now)

    def router(self, phase=ServicePhase.READY, detail=""):
        self.ledger.service_told(service(phase=phase, detail=detail), self.now)
        self.console.happened.service_told(service(phase=phase, detail=detail), self.moment.at)

    def well(self):
        self.router()
        self.fleet(D1, P1)

    def texts(self):
        return [line.text for line in self.page().events]

    def sentences(self, **how):
        return [one.text for one in self.page(**how).health.sentences]


@pytest.fixture
def told():
    return Told()


def test_a_requests_parts_add_up_to_its_time_to_the_first_token(told):
    told.finish(finished())

    (row,) = told.page().requests
    assert sum(part.seconds for part in row.parts) == pytest.approx(row.ttft_s)
    assert [part.name for part in row.parts] == ["admission", "queue", "prefill", "handoff", "first_token"]
    assert row.parts[2].seconds == PARTS.prefill_s


def test_what_a_router_does_not_know_is_null_and_not_minus_one(told):
    told.finish(finished(ttft_s=-1.0, ttft_parts=None, cached_tokens=-1, itl_s=-1.0, status=503, reason="overloaded"))

    row = msgspec.to_builtins(told.page().requests[0])
    assert [row[name] for name in ("ttft_s", "itl_s", "cached_tokens", "fetched_tokens")] == [None] * 4
    assert row["parts"] == []


def test_a_request_is_slow_if_it_missed_its_target(told):
    told.finish(finished(ttft_s=0.9, ttft_target_s=1.0), finished(ttft_s=1.1, ttft_target_s=1.0))

    assert [row.slow for row in told.page().requests] == [True, False]


def test_without_a_target_a_request_is_slow_if_it_took_far_longer_than_is_usual(told):
    told.finish(*[finished(ttft_s=0.1)] * SAMPLES_MIN, finished(ttft_s=0.2), finished(ttft_s=0.5))

    assert [row.slow for row in told.page().requests][:3] == [True, False, False]


def test_the_newest_requests_come_first_and_there_are_not_more_than_the_page_has_room_for(told):
    told.finish(*[finished(request_id=f"r{number}") for number in range(REQUESTS_MAX + 5)])

    rows = told.page().requests
    assert (len(rows), rows[0].id) == (REQUESTS_MAX, f"r{REQUESTS_MAX + 4}")


def test_flows_are_drawn_from_the_router_to_the_worker_that_begins_and_from_source_to_reader(told):
    told.now = 10.0
    moved = [KvMoved(source_id="d1", reader_id="p1", tokens=32, bytes=64), *finished().kv_moves]
    told.finish(finished(kv_moves=moved), finished(prefill_worker="", kv_moves=[]))

    lines = {(line.kind, line.source, line.target): line for line in told.page().flows}
    assert set(lines) == {
        ("kv", "d1", "p1"),
        ("kv", "p1", "d1"),
        ("requests", "router", "d1"),
        ("requests", "router", "p1"),
    }
    assert lines["kv", "p1", "d1"].bytes_per_s == 4096
    told.now = 30.0
    assert told.page().flows == []


def test_of_more_flows_than_can_be_drawn_the_newest_are(told):
    moves = [KvMoved(source_id=f"w{number}", reader_id="d1", tokens=1, bytes=1) for number in range(FLOWS_MAX + 3)]
    told.finish(finished(kv_moves=moves[:2]), finished(kv_moves=[moves[0], *moves[2:]]))

    sources = {line.source for line in told.page().flows}
    assert len(sources) == FLOWS_MAX
    assert not sources & {"router", "w1"}


def test_a_tenants_last_minute_is_told_and_its_refusals_count(told):
    told.now = 100.0
    told.finish(
        finished(tenant="a"),
        finished(tenant="a", status=429, reason="over_share", prompt_tokens=-1, completion_tokens=-1),
    )
    told.now = 159.0

    (row,) = told.page().tenants
    assert (row.tenant, row.cached_ratio) == ("a", 0.4)
    assert row.requests_per_s == pytest.approx(2 * row.refused_per_s, abs=0.02)


def test_tenants_beyond_the_maximum_are_one(told):
    told.finish(*[finished(tenant=f"t{number}") for number in range(TENANTS_MAX + 20)])

    rows = told.page().tenants
    assert len(rows) == TENANTS_MAX + 1
    assert "other" in {row.tenant for row in rows}


def test_a_worker_is_drawn_with_its_load_its_rates_and_what_it_found_in_its_cache(told):
    told.fleet(P1)
    told.load("p1", role=Role.PREFILL, kv_blocks_used=25, kv_blocks_total=100, waiting=3)
    told.now = 5.0
    told.load(
        "p1",
        role=Role.PREFILL,
        kv_blocks_used=50,
        kv_blocks_total=100,
        prompt_tokens_total=1000,
        cached_tokens_total=250,
    )

    page = told.page()
    (card,) = page.workers
    assert (card.role, card.phase, card.model, card.host) == ("prefill", "ready", "m", "h")
    assert (card.kv_used, card.hit_ratio, card.prompt_tokens_per_s) == (0.5, 0.25, 200.0)
    assert page.model_names == ["m"]


def test_without_an_orchestrator_workers_are_still_drawn_with_what_is_known_of_them(told):
    told.fleet(P1)
    told.load("p1", role=Role.PREFILL)
    told.now = STALE_S_MAX + 1
    told.load("p1", role=Role.PREFILL, running=2)

    (card,) = told.page().workers
    assert (card.role, card.model, card.running) == ("prefill", "m", 2)


def test_a_workers_life_is_told_once_in_words(told):
    told.fleet(P1, D1)
    told.fleet(
        P1, record("d1", WorkerPhase.DRAINING, role=Role.DECODE), record("d2", WorkerPhase.PROBING, role=Role.DECODE)
    )
    told.console.happened.worker_lost(WorkerLost(worker_id="p1", epoch=1, silent_s=3.1), told.moment.at)
    told.fleet(record("p1", WorkerPhase.LOST, role=Role.PREFILL), record("d2", role=Role.PREFILL))

    lives = [(line.subject, line.text) for line in told.page().events if line.kind == "lifecycle"]
    assert lives[::-1] == [
        ("d1", "ready → draining"),
        ("d2", "probing as decode"),
        ("p1", "lost: silent for 3.1 s"),
        ("d2", "probing → ready"),
        ("d2", "is prefill now, was decode"),
        ("d1", "is gone"),
    ]


def test_drains_plans_and_orders_become_text_events(told):
    told.console.happened.worker_drained(WorkerDrained(worker_id="d1", epoch=1, seconds=2.0, legs=1), 1.0)
    plan = PlanDecision(
        number=1, at_ms=0, model="m", demand=Demand(), roles=[], action=PlanAction.SCALE, change=2, role=Role.DECODE
    )
    told.console.happened.planned(msgspec.structs.replace(plan, why="decode is full"), 2.0)
    told.console.happened.planned(msgspec.structs.replace(plan, action=PlanAction.NOTHING), 2.0)
    told.console.happened.acted("d1", "an operator told it to drain", 3.0)

    assert told.texts() == [
        "an operator told it to drain",
        "add 2 decode workers: decode is full",
        "d1 drained in 2.0 s: 1 of 1 running requests finished.",
    ]


def test_a_service_is_told_of_when_its_phase_changes(told):
    for phase in (ServicePhase.STARTING, ServicePhase.READY, ServicePhase.READY):
        told.router(phase)
    told.router(ServicePhase.FAILED, "the port is taken")

    assert told.texts() == ["router failed: the port is taken", "router ready", "router starting"]


def test_a_service_that_falls_silent_is_told_of_and_one_that_stopped_is_not(told):
    told.router()
    told.now = STALE_S_MAX + 1
    assert "router fell silent" in told.texts()
    told.router(ServicePhase.STOPPED)
    told.now += STALE_S_MAX + 1
    assert told.texts()[0] == "router stopped"


def test_events_are_bounded(told):
    for number in range(EVENTS_MAX + 9):
        told.console.happened.acted("d1", str(number), 1.0)

    assert len(told.page().events) == EVENTS_MAX


def test_a_system_in_which_all_is_well_says_so(told):
    told.well()

    health = told.page().health
    assert health.status == "well"
    assert health.sentences[0].text == "All is well: 2 workers ready, 0.0 requests per second."


def test_a_silent_worker_is_named_with_what_to_do(told):
    told.well()
    told.load("p1", role=Role.PREFILL)
    told.now = 4.5
    told.fleet(D1, P1)

    (one,) = told.page().health.sentences
    assert one.text == "p1 has not been heard for 4 s; requests go to others."
    assert one.do == "If it stays silent, see its log."
    assert told.page().health.status == "strained"


def test_what_is_missing_is_said_and_the_worst_comes_first(told):
    told.fleet(record("p1", WorkerPhase.LOST))

    page = told.page()
    assert page.health.status == "ill"
    assert [one.level for one in page.health.sentences] == ["error", "error", "warning"]
    assert "There are no workers: nothing can be served." in told.sentences()
    assert "No router is ready: clients get no answers." in told.sentences()


def test_without_nats_only_that_is_said(told):
    told.well()

    assert told.sentences(connected=False) == ["NATS cannot be reached from here: what is shown is old."]


def test_failures_of_the_last_minute_are_counted_with_their_most_frequent_reason(told):
    told.now = 100.0
    told.well()
    failed = [finished(status=502, reason="worker_lost")] * 3 + [finished(status=502, reason="deadline")]
    told.finish(*[finished()] * 16, *failed)

    assert told.sentences() == ["In the last minute 4 of 20 requests failed, most of them with worker_lost."]
    assert told.page().health.status == "ill"
    told.now = 161.0
    told.well()
    assert told.page().health.status == "well"


def test_refusals_and_missed_targets_strain_it(told):
    told.now = 100.0
    told.well()
    told.finish(*[finished(ttft_target_s=0.01)] * 10, finished(status=503, reason="overloaded", ttft_s=-1.0))

    assert told.sentences() == [
        "In the last minute 1 of 11 requests were refused because all workers were busy.",
        "In the last minute 10 of 11 requests missed their targets.",
    ]


def test_when_health_changes_it_is_an_event_whether_or_not_anybody_looks(told):
    told.now = 2.0
    told.well()
    told.router(ServicePhase.FAILED, "no port")
    told.now = 4.0
    told.fleet(P1, D1)
    told.now = 6.0
    told.well()

    health = [line.text for line in told.page().events if line.kind == "health"]
    assert health == [
        "ill → well: All is well: 2 workers ready, 0.0 requests per second.",
        "well → ill: router router-1 has failed: no port.",
    ]


def test_changes_are_what_the_page_did_not_show_before_and_nothing_else(told):
    told.well()
    told.finish(finished(request_id="r1"))
    before = told.page()
    assert changes(before, told.page()) == []

    told.finish(finished(request_id="r2"), finished(request_id="r3"))
    told.load("p1", role=Role.PREFILL, running=1)
    told.fleet(P1)
    heard = changes(before, told.page())

    assert [data.id for name, data in heard if name == "request"] == ["r2", "r3"]
    assert [[card.id for card in data] for name, data in heard if name == "workers"] == [["p1"]]
    assert [data for name, data in heard if name == "gone"] == [["d1"]]
    assert [data.text for name, data in heard if name == "event" and data.kind == "lifecycle"] == ["is gone"]


def test_of_a_flood_of_requests_the_newest_are_told(told):
    before = told.page()
    told.finish(*[finished(request_id=f"r{number}") for number in range(500)])

    ids = [data.id for name, data in changes(before, told.page()) if name == "request"]
    assert ids == [f"r{number}" for number in range(450, 500)]
