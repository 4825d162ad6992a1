"""The console's page follows the reports, and its updates contain exactly the changes."""

import msgspec
import pytest

from services.collector.console.events import EVENTS_MAX
from services.collector.console.requests import REQUESTS_MAX, SAMPLES_MIN
from services.collector.console.state import ConsoleState, Moment, changes
from services.collector.console.traffic import FLOWS_MAX, TENANTS_MAX
from services.collector.metrics.exposition import BOUNDS
from services.collector.metrics.fleet_metrics import STALE_S_MAX, FleetMetrics
from shared.contracts.control import DiskFolder, DiskSpace, ServicePhase
from shared.contracts.fleet_orders import WorkerDrained
from shared.contracts.inference import KvMoved
from shared.contracts.planning import Demand, PlanAction, PlanDecision
from shared.contracts.workers import FleetWorker, Role, WorkerLost, WorkerPhase
from tests.support.fleet_builders import load, record
from tests.unit.collector.console_world import PARTS, finished, fleet, service

P1, D1 = record("p1", role=Role.PREFILL), record("d1", role=Role.DECODE)


class Shown:
    """A console that receives reports at times that the test sets."""

    def __init__(self):
        self.metrics = FleetMetrics(BOUNDS, 0.0)
        self.console = ConsoleState(self.metrics, 0.0)
        self.now = 0.0

    @property
    def moment(self):
        return Moment(self.now, 1_000_000.0 + self.now)

    def page(self, *, connected=True):
        return self.console.page(self.moment, connected=connected)

    def fleet(self, *workers, **which):
        self.metrics.fleet.update(fleet(*workers, **which), self.now)
        self.console.fleet_updated(self.moment)

    def finish(self, *requests):
        self.console.requests_finished(requests, self.moment)

    def load(self, *args, **numbers):
        self.metrics.load_reported(load(*args, **numbers), self.now)

    def router(self, phase=ServicePhase.READY, detail="", warning=""):
        self.metrics.service_status(service(phase=phase, detail=detail, warning=warning), self.now)
        self.console.events.service_status(service(phase=phase, detail=detail), self.moment.at)

    def healthy(self):
        self.router()
        self.fleet(D1, P1)

    def texts(self):
        return [line.text for line in self.page().events]

    def sentences(self, **how):
        return [one.text for one in self.page(**how).health.sentences]


@pytest.fixture
def shown():
    return Shown()


def test_a_requests_parts_add_up_to_its_ttft(shown):
    shown.finish(finished())

    (row,) = shown.page().requests
    assert sum(part.seconds for part in row.parts) == pytest.approx(row.ttft_s)
    assert [part.name for part in row.parts] == ["admission", "queue", "prefill", "handoff", "decode_prefill"]
    assert row.parts[2].seconds == PARTS.prefill_s


def test_unknown_values_are_null(shown):
    shown.finish(finished(ttft_s=-1.0, ttft_parts=None, cached_tokens=-1, itl_s=-1.0, status=503, reason="overloaded"))

    row = msgspec.to_builtins(shown.page().requests[0])
    assert [row[name] for name in ("ttft_s", "itl_s", "cached_tokens", "fetched_tokens")] == [None] * 4
    assert row["parts"] == []


def test_a_request_is_slow_when_it_misses_its_target(shown):
    shown.finish(finished(ttft_s=0.9, ttft_target_s=1.0), finished(ttft_s=1.1, ttft_target_s=1.0))

    assert [row.slow for row in shown.page().requests] == [True, False]


def test_without_a_target_a_request_far_above_the_median_is_slow(shown):
    shown.finish(*[finished(ttft_s=0.1)] * SAMPLES_MIN, finished(ttft_s=0.2), finished(ttft_s=0.5))

    assert [row.slow for row in shown.page().requests][:3] == [True, False, False]


def test_a_line_of_a_batch_is_never_slow_and_raises_no_median(shown):
    lines = [finished(ttft_s=100.0, is_batch=True)] * SAMPLES_MIN
    shown.finish(*[finished(ttft_s=0.1)] * SAMPLES_MIN, *lines, finished(ttft_s=0.5))

    assert [row.slow for row in shown.page().requests][:2] == [True, False]


def test_the_newest_requests_come_first_up_to_the_maximum(shown):
    shown.finish(*[finished(request_id=f"r{number}") for number in range(REQUESTS_MAX + 5)])

    rows = shown.page().requests
    assert (len(rows), rows[0].id) == (REQUESTS_MAX, f"r{REQUESTS_MAX + 4}")


def test_flows_go_from_router_to_first_worker_and_from_source_to_reader(shown):
    shown.now = 10.0
    moved = [KvMoved(source_id="d1", reader_id="p1", tokens=32, bytes=64), *finished().kv_moves]
    shown.finish(finished(kv_moves=moved), finished(prefill_worker="", kv_moves=[]))

    lines = {(line.kind, line.source, line.target): line for line in shown.page().flows}
    assert set(lines) == {
        ("kv", "d1", "p1"),
        ("kv", "p1", "d1"),
        ("requests", "router", "d1"),
        ("requests", "router", "p1"),
    }
    assert lines["kv", "p1", "d1"].bytes_per_s == 4096
    shown.now = 30.0
    assert shown.page().flows == []


def test_each_model_has_a_row_with_its_workers_and_its_last_minute(shown):
    shown.now = 100.0
    workers = (P1, D1, record("b1", models=("n",)), record("b2", WorkerPhase.STARTING, models=("n",)))
    shown.fleet(*workers)
    shown.finish(
        finished(ttft_s=0.2),
        finished(ttft_s=0.4),
        finished(ttft_s=9.0, is_batch=True),
        finished(status=502, reason="worker_lost", ttft_s=-1.0),
    )
    shown.finish(finished(model="never heard of"), finished(model="n", status=429, reason="over_share"))
    shown.now = 159.0
    shown.fleet(*workers)

    first, second = shown.page().models
    assert (first.model, first.ready, first.ttft_s) == ("m", {"decode": 1, "prefill": 1}, 0.3)
    assert first.requests_per_s == pytest.approx(3 * first.failed_per_s, abs=0.03)
    assert (second.model, second.ready, second.failed_per_s) == ("n", {"both": 1}, 0.0)
    assert second.requests_per_s > 0.0


def test_a_model_that_sleeps_is_no_trouble(shown):
    shown.router()
    shown.fleet(P1, D1, record("b1", WorkerPhase.ASLEEP, models=("n",)))

    page = shown.page()
    assert page.health.status == "healthy"
    assert "n is asleep; a request wakes it." in [one.text for one in page.health.sentences]
    assert page.models[1].ready == {}


def test_health_looks_at_each_model_by_itself(shown):
    shown.router()
    shown.fleet(
        P1, D1, record("d2", role=Role.DECODE, models=("n",)), record("o1", WorkerPhase.STARTING, models=("o",))
    )

    sentences = shown.sentences()
    assert "No prefill worker of n is ready: decode workers compute both phases until one is." in sentences
    assert "No worker of o is ready: requests for it get 503." in sentences
    assert not [one for one in sentences if " of m " in one]


def test_beyond_the_maximum_the_newest_flows_are_kept(shown):
    moves = [KvMoved(source_id=f"w{number}", reader_id="d1", tokens=1, bytes=1) for number in range(FLOWS_MAX + 3)]
    shown.finish(finished(kv_moves=moves[:2]), finished(kv_moves=[moves[0], *moves[2:]]))

    sources = {line.source for line in shown.page().flows}
    assert len(sources) == FLOWS_MAX
    assert not sources & {"router", "w1"}


def test_a_tenants_row_covers_its_last_minute_with_refusals(shown):
    shown.now = 100.0
    shown.finish(
        finished(tenant="a"),
        finished(tenant="a", status=429, reason="over_share", prompt_tokens=-1, completion_tokens=-1),
    )
    shown.now = 159.0

    (row,) = shown.page().tenants
    assert (row.tenant, row.cached_ratio) == ("a", 0.4)
    assert row.requests_per_s == pytest.approx(2 * row.refused_per_s, abs=0.02)


def test_tenants_beyond_the_maximum_are_counted_together(shown):
    shown.finish(*[finished(tenant=f"t{number}") for number in range(TENANTS_MAX + 20)])

    rows = shown.page().tenants
    assert len(rows) == TENANTS_MAX + 1
    assert "other" in {row.tenant for row in rows}


def test_a_worker_card_has_load_rates_and_cache_hits(shown):
    shown.fleet(P1)
    shown.load("p1", role=Role.PREFILL, kv_tokens_used=25, kv_tokens_total=100, waiting=3)
    shown.now = 5.0
    shown.load(
        "p1",
        role=Role.PREFILL,
        kv_tokens_used=50,
        kv_tokens_total=100,
        prompt_tokens_total=1000,
        cached_tokens_total=250,
    )

    page = shown.page()
    (card,) = page.workers
    assert (card.role, card.phase, card.model, card.host) == ("prefill", "ready", "m", "h")
    assert (card.kv_used, card.hit_ratio, card.prompt_tokens_per_s) == (0.5, 0.25, 200.0)
    assert page.model_names == ["m"]


def test_without_an_orchestrator_worker_cards_keep_their_last_record(shown):
    shown.fleet(P1)
    shown.load("p1", role=Role.PREFILL)
    shown.now = STALE_S_MAX + 1
    shown.load("p1", role=Role.PREFILL, running=2)

    (card,) = shown.page().workers
    assert (card.role, card.model, card.running) == ("prefill", "m", 2)


def test_each_lifecycle_change_of_a_worker_is_one_event(shown):
    shown.fleet(P1, D1)
    shown.fleet(
        P1, record("d1", WorkerPhase.DRAINING, role=Role.DECODE), record("d2", WorkerPhase.PROBING, role=Role.DECODE)
    )
    shown.console.events.worker_lost(WorkerLost(worker_id="p1", epoch=1, silent_s=3.1), shown.moment.at)
    shown.fleet(record("p1", WorkerPhase.LOST, role=Role.PREFILL), record("d2", role=Role.PREFILL))

    lives = [(line.subject, line.text) for line in shown.page().events if line.kind == "lifecycle"]
    assert lives[::-1] == [
        ("d1", "ready → draining"),
        ("d2", "probing as decode"),
        ("p1", "lost: no report for 3.1 s"),
        ("d2", "probing → ready"),
        ("d2", "role decode → prefill"),
        ("d1", "is gone"),
    ]


def test_drains_plans_and_orders_are_events(shown):
    shown.console.events.worker_drained(WorkerDrained(worker_id="d1", epoch=1, seconds=2.0, legs=1), 1.0)
    plan = PlanDecision(
        number=1, at_ms=0, model="m", demand=Demand(), roles=[], action=PlanAction.SCALE, change=2, role=Role.DECODE
    )
    shown.console.events.planned(msgspec.structs.replace(plan, why="decode is full"), 2.0)
    shown.console.events.planned(msgspec.structs.replace(plan, action=PlanAction.NOTHING), 2.0)
    shown.console.events.order_given("d1", "an operator ordered it to drain", 3.0)

    assert shown.texts() == [
        "an operator ordered it to drain",
        "add 2 decode workers: decode is full",
        "d1 drained in 2.0 s: 1 of 1 running requests finished.",
    ]


def test_a_phase_change_of_a_service_is_an_event(shown):
    for phase in (ServicePhase.STARTING, ServicePhase.READY, ServicePhase.READY):
        shown.router(phase)
    shown.router(ServicePhase.FAILED, "the port is taken")

    assert shown.texts() == ["router failed: the port is taken", "router ready", "router starting"]


def test_a_silent_service_is_an_event_but_a_stopped_one_is_not(shown):
    shown.router()
    shown.now = STALE_S_MAX + 1
    assert "router stopped reporting" in shown.texts()
    shown.router(ServicePhase.STOPPED)
    shown.now += STALE_S_MAX + 1
    assert shown.texts()[0] == "router stopped"


def test_events_are_bounded(shown):
    for number in range(EVENTS_MAX + 9):
        shown.console.events.order_given("d1", str(number), 1.0)

    assert len(shown.page().events) == EVENTS_MAX


def test_a_system_without_findings_is_healthy(shown):
    shown.healthy()

    health = shown.page().health
    assert health.status == "healthy"
    assert health.sentences[0].text == "2 workers ready."


def test_a_silent_worker_is_reported_with_an_action(shown):
    shown.healthy()
    shown.load("p1", role=Role.PREFILL)
    shown.now = 4.5
    shown.fleet(D1, P1)

    (one,) = shown.page().health.sentences
    assert one.text == "p1 has sent no report for 4 s; requests go to other workers."
    assert one.action == "If it does not report again, see its log."
    assert shown.page().health.status == "degraded"


def test_a_worker_that_loads_a_model_for_minutes_is_not_called_silent(shown):
    shown.healthy()
    starting = msgspec.structs.replace(P1, phase=WorkerPhase.STARTING)
    listed = FleetWorker(record=starting, phase=starting.phase, since_s=90.0, silent_s=90.0)
    shown.metrics.fleet.update(msgspec.structs.replace(fleet(), workers=[listed]), shown.now)

    assert "p1: starting." in shown.sentences()
    assert not [text for text in shown.sentences() if "no report" in text]


def test_a_full_disk_is_named_once_for_all_processes_of_its_host(shown):
    shown.healthy()
    disk = DiskSpace(folder=DiskFolder.STATE, free_bytes=0, size_bytes=2**30)
    for name in ("router", "orchestrator"):
        status = msgspec.structs.replace(service(name, name), host="h1", disks=[disk])
        shown.metrics.service_status(status, shown.now)

    (one,) = shown.page().health.sentences
    assert one.text == "The disk of state on h1 is full: 0 B of 1.0 GiB are free. Requests are still served."
    assert (one.action != "", shown.page().health.status) == (True, "degraded")


def test_a_service_with_a_key_file_that_it_cannot_read_is_degraded(shown):
    shown.healthy()
    shown.router(warning="ROUTER_KEYS_FILE (keys.toml): Invalid value")

    (one,) = shown.page().health.sentences
    assert "ROUTER_KEYS_FILE (keys.toml): Invalid value" in one.text
    assert (one.action != "", shown.page().health.status) == (True, "degraded")


def test_missing_services_are_reported_worst_first(shown):
    shown.fleet(record("p1", WorkerPhase.LOST))

    page = shown.page()
    assert page.health.status == "unhealthy"
    assert [one.level for one in page.health.sentences] == ["error", "error", "warning"]
    assert "There are no workers: nothing can be served." in shown.sentences()
    assert "No router is ready: clients get no replies." in shown.sentences()


def test_without_nats_only_that_is_reported(shown):
    shown.healthy()

    assert shown.sentences(connected=False) == ["The collector cannot reach NATS: this page shows an old state."]


def test_failures_of_the_last_minute_are_counted_with_their_most_frequent_reason(shown):
    shown.now = 100.0
    shown.healthy()
    failed = [finished(status=502, reason="worker_lost")] * 3 + [finished(status=502, reason="deadline")]
    asleep = finished(status=503, reason="model_asleep")
    shown.finish(*[finished()] * 15, asleep, *failed)

    assert shown.sentences() == ["In the last minute 4 of 20 requests failed, most often with worker_lost."]
    assert shown.page().health.status == "unhealthy"
    shown.now = 161.0
    shown.healthy()
    assert shown.page().health.status == "healthy"


def test_refusals_and_missed_targets_degrade_health(shown):
    shown.now = 100.0
    shown.healthy()
    shown.finish(*[finished(ttft_target_s=0.01)] * 10, finished(status=503, reason="overloaded", ttft_s=-1.0))

    assert shown.sentences() == [
        "In the last minute 1 of 11 requests were refused because all workers were busy.",
        "In the last minute 10 of 11 requests missed their targets.",
    ]


def test_a_health_change_is_an_event_without_any_browser(shown):
    shown.now = 2.0
    shown.healthy()
    shown.router(ServicePhase.FAILED, "no port")
    shown.now = 4.0
    shown.fleet(P1, D1)
    shown.now = 6.0
    shown.healthy()

    health = [line.text for line in shown.page().events if line.kind == "health"]
    assert health == [
        "unhealthy → healthy: 2 workers ready.",
        "healthy → unhealthy: router router-1 has failed: no port.",
    ]


def test_changes_are_exactly_what_the_last_page_lacks(shown):
    shown.healthy()
    shown.finish(finished(request_id="r1"))
    before = shown.page()
    assert changes(before, shown.page()) == []

    shown.finish(finished(request_id="r2"), finished(request_id="r3"))
    shown.load("p1", role=Role.PREFILL, running=1)
    shown.fleet(P1)
    heard = changes(before, shown.page())

    assert [data.id for name, data in heard if name == "request"] == ["r2", "r3"]
    assert [[card.id for card in data] for name, data in heard if name == "workers"] == [["p1"]]
    assert [data for name, data in heard if name == "gone"] == [["d1"]]
    assert [data.text for name, data in heard if name == "event" and data.kind == "lifecycle"] == ["is gone"]


def test_a_burst_of_requests_sends_only_the_newest(shown):
    before = shown.page()
    shown.finish(*[finished(request_id=f"r{number}") for number in range(500)])

    ids = [data.id for name, data in changes(before, shown.page()) if name == "request"]
    assert ids == [f"r{number}" for number in range(450, 500)]
