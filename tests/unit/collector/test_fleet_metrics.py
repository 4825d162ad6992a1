"""Totals, rates and labels of the fleet's metrics."""

from prometheus_client.parser import text_string_to_metric_families

from services.collector.metrics.exposition import BOUNDS, families
from services.collector.metrics.fleet_metrics import STALE_S_MAX, WORKERS_MAX, FleetMetrics
from services.orchestrator.lifecycle import Worker
from shared.bus.port import BusCounts
from shared.contracts.control import DiskFolder, DiskSpace, ProcessUse, ServicePhase, ServiceStatus
from shared.contracts.inference import RequestFinished
from shared.contracts.kv_exchange import KvExchangeState
from shared.contracts.workers import FleetState, Role, WorkerLost, WorkerPhase
from shared.telemetry import names
from shared.telemetry.prometheus import to_prometheus
from tests.support.fleet_builders import load, record


def metrics():
    return FleetMetrics(BOUNDS, 0.0)


def request(**facts):
    defaults = {
        "request_id": "r1",
        "model": "m",
        "path": "/v1/completions",
        "mode": "disaggregated",
        "status": 200,
        "prefill_worker": "p1",
        "decode_worker": "d1",
        "prompt_tokens": 100,
        "completion_tokens": 10,
        "ttft_s": 0.03,
        "itl_s": 0.008,
        "e2e_s": 0.2,
    }
    return RequestFinished(**{**defaults, **facts})


def fleet(*phases, term=1):
    workers = [Worker(record=record(name, phase), phase=phase, since=0.0, heard=0.0) for name, phase in phases]
    return FleetState(leader="o1", term=term, workers=[each.described(1.0) for each in workers])


class Shown:
    """The samples as Prometheus reads them."""

    def __init__(self, one: FleetMetrics, now: float) -> None:
        text = to_prometheus(families(one, BusCounts(), now))[0].decode()
        self.samples = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def __call__(self, metric: names.Metric, suffix: str = "", **labels: str) -> float | None:
        return self.samples.get((metric.name + suffix, *sorted(labels.items())))


def test_counters_begin_at_zero_in_a_new_role_and_stay_in_the_old_one():
    one = metrics()
    before = {"computed_tokens_total": 100, "exchange": KvExchangeState(leases_granted_total=7)}
    after = {"computed_tokens_total": 130, "exchange": KvExchangeState(leases_granted_total=8)}
    one.load_reported(load("w1", role=Role.PREFILL, **before), 1.0)
    one.request_finished(request(mode="aggregated", decode_worker="w1", e2e_s=1.0), 1.0)
    one.load_reported(load("w1", role=Role.DECODE, **before), 2.0)
    one.load_reported(load("w1", role=Role.DECODE, **after), 3.0)
    one.request_finished(request(mode="disaggregated", decode_worker="w1", e2e_s=1.0), 3.0)

    shown = Shown(one, 3.0)
    old, new = ({"worker_id": "w1", "role": role} for role in ("prefill", "decode"))
    assert shown(names.WORKER_PROMPT_TOKENS, **old, source="computed") == 100
    assert shown(names.WORKER_PROMPT_TOKENS, **new, source="computed") == 30
    assert shown(names.WORKER_LEASES, **old, outcome="granted") == 7
    assert shown(names.WORKER_LEASES, **new, outcome="granted") == 1
    assert shown(names.WORKER_REQUESTS, **old, mode="aggregated") == 1
    assert shown(names.WORKER_REQUESTS, **new, mode="aggregated") is None
    assert shown(names.WORKER_REQUESTS, **new, mode="disaggregated") == 1
    assert shown(names.WORKER_E2E, "_count", **new) == 1
    assert shown(names.WORKER_RUNNING, **old) is None
    assert shown(names.WORKER_RUNNING, **new) == 0


def test_a_load_report_is_shown_per_worker_and_role():
    one = metrics()
    one.load_reported(
        load(
            "p1", role=Role.PREFILL, running=2, waiting=3, kv_tokens_used=30, kv_tokens_total=40, cached_tokens_total=7
        ),
        1.0,
    )
    shown = Shown(one, 1.0)

    who = {"worker_id": "p1", "role": "prefill"}
    assert shown(names.WORKER_RUNNING, **who) == 2
    assert shown(names.WORKER_WAITING, **who) == 3
    assert shown(names.WORKER_KV_USED, **who) == 0.75
    assert shown(names.WORKER_PROMPT_TOKENS, source="cached", **who) == 7
    assert shown(names.FLEET_PROMPT_TOKENS, source="cached") == 7


def test_a_silent_worker_disappears_but_the_fleet_keeps_its_totals():
    one = metrics()
    one.load_reported(load("w1", generation_tokens_total=50), 1.0)
    later = 1.0 + STALE_S_MAX
    shown = Shown(one, later)

    assert shown(names.WORKER_GENERATION_TOKENS, worker_id="w1", role="both") is None
    assert shown(names.FLEET_GENERATION_TOKENS) == 50

    one.load_reported(load("w1", generation_tokens_total=60), later)
    assert Shown(one, later)(names.FLEET_GENERATION_TOKENS) == 60


def test_totals_continue_after_a_worker_restarts_from_zero():
    one = metrics()
    one.load_reported(load("w1", epoch=1, computed_tokens_total=1000), 1.0)
    one.load_reported(load("w1", epoch=2, computed_tokens_total=10), 2.0)
    one.load_reported(load("w1", epoch=1, computed_tokens_total=2000), 2.1)
    shown = Shown(one, 3.0)

    assert shown(names.WORKER_PROMPT_TOKENS, worker_id="w1", role="both", source="computed") == 1010


def test_totals_before_the_first_report_add_no_rate():
    one = metrics()
    one.load_reported(load("w1", generation_tokens_total=1_000_000), 1.0)
    one.load_reported(load("w1", generation_tokens_total=1_000_050), 2.0)

    assert Shown(one, 11.0)(names.WORKER_TOKENS_OUT, worker_id="w1", role="both") == 5.0


def test_a_finished_request_counts_by_model_mode_and_status():
    one = metrics()
    one.load_reported(load("d1", role=Role.DECODE), 1.0)
    one.request_finished(request(), 1.0)
    shown = Shown(one, 1.0)

    assert shown(names.FLEET_REQUESTS, model="m", mode="disaggregated", status="200") == 1
    assert shown(names.FLEET_TTFT, "_count", model="m", mode="disaggregated") == 1
    assert shown(names.FLEET_TTFT, "_bucket", model="m", mode="disaggregated", le="0.05") == 1
    assert shown(names.FLEET_TTFT, "_bucket", model="m", mode="disaggregated", le="0.025") == 0
    assert shown(names.WORKER_E2E, "_count", worker_id="d1", role="decode") == 1
    assert shown(names.WORKER_REQUESTS, worker_id="d1", role="decode", mode="disaggregated") == 1
    assert shown(names.FLEET_REQUEST_TOKENS, model="m", kind="prompt") == 100
    assert shown(names.FLEET_REQUEST_RATE) == 1.0


def test_wrong_predictions_are_counted_where_the_prompt_was_computed():
    one = metrics()
    for worker_id, role in (("p1", Role.PREFILL), ("d1", Role.DECODE)):
        one.load_reported(load(worker_id, role=role), 1.0)
    for predicted, found in ((64, 32), (32, 64), (-1, 64), (64, -1)):
        one.request_finished(request(predicted_cached_tokens=predicted, cached_tokens=found, prefill_worker="p1"), 1.0)
    one.request_finished(request(predicted_cached_tokens=5, cached_tokens=0, prefill_worker=""), 1.0)
    shown = Shown(one, 1.0)

    assert shown(names.WORKER_CACHED_MISSED, worker_id="p1", role="prefill") == 64
    assert shown(names.WORKER_CACHED_MISSED, worker_id="d1", role="decode") == 5
    assert shown(names.FLEET_CACHED_MISSED) == 69


def test_unknown_values_are_not_observed():
    one = metrics()
    one.request_finished(request(status=503, reason="no_worker", ttft_s=-1.0, itl_s=-1.0, prompt_tokens=-1), 1.0)
    shown = Shown(one, 1.0)

    assert shown(names.FLEET_TTFT, "_count", model="m", mode="disaggregated") == 0
    assert shown(names.FLEET_E2E, "_count", model="m", mode="disaggregated") == 1
    assert shown(names.FLEET_FAILURES, model="m", reason="no_worker") == 1
    assert shown(names.FLEET_REQUEST_TOKENS, model="m", kind="prompt") == 0


def test_predictions_are_compared_where_both_numbers_are_known():
    one = metrics()
    one.request_finished(request(predicted_cached_tokens=64, cached_tokens=96), 1.0)
    one.request_finished(request(predicted_cached_tokens=32, cached_tokens=0), 1.0)
    one.request_finished(request(predicted_cached_tokens=32, cached_tokens=-1), 1.0)
    shown = Shown(one, 1.0)

    assert shown(names.FLEET_CACHED_PREDICTED) == 96
    assert shown(names.FLEET_CACHED_ACTUAL) == 96
    assert shown(names.FLEET_CACHED_MISSED) == 64


def test_the_fleet_is_shown_by_phase_until_its_state_expires():
    one = metrics()
    one.fleet.update(fleet(("w1", WorkerPhase.READY), ("w2", WorkerPhase.LOST), term=3), 1.0)
    shown = Shown(one, 1.0)

    assert shown(names.FLEET_WORKERS, model="m", role="both", phase="ready") == 1
    assert shown(names.WORKER_PHASE, worker_id="w2", role="both", phase="lost") == 1
    assert shown(names.WORKER_INFO, worker_id="w2", role="both", model="m") == 1
    assert shown(names.FLEET_TERM) == 3

    one.expire(1.0 + STALE_S_MAX)
    assert Shown(one, 1.0 + STALE_S_MAX)(names.FLEET_WORKERS, model="m", role="both", phase="ready") is None


def test_a_leader_of_an_earlier_term_is_ignored():
    one = metrics()
    one.fleet.update(fleet(("w1", WorkerPhase.READY), term=5), 1.0)
    one.fleet.update(fleet(term=4), 1.1)
    assert one.fleet.state.term == 5

    one.fleet.update(fleet(term=1), 1.1 + STALE_S_MAX)
    assert one.fleet.state.term == 1


def test_a_loss_that_two_leaders_report_counts_once():
    one = metrics()
    for silent_s in (3.0, 8.0):
        one.fleet.lost(WorkerLost(worker_id="w1", epoch=1, silent_s=silent_s))
    one.fleet.lost(WorkerLost(worker_id="w1", epoch=2, silent_s=3.0))

    assert Shown(one, 1.0)(names.FLEET_WORKERS_LOST) == 2


def test_services_are_shown_with_their_phase_and_disks():
    one = metrics()
    one.service_status(ServiceStatus(service="router", instance="r1", phase=ServicePhase.STARTING), 1.0)
    disks = [DiskSpace(folder=DiskFolder.NATS, free_bytes=3, size_bytes=9)]
    use = ProcessUse(rss_bytes=5, cpu_s=1.5, open_files=7, open_files_max=8, loop_lag_s=0.25)
    one.service_status(
        ServiceStatus(
            service="router", instance="r1", phase=ServicePhase.READY, disks=disks, process=use, refused_connections=6
        ),
        2.0,
    )
    shown = Shown(one, 2.0)

    assert shown(names.SERVICE_PHASE, service="router", process="r1", phase="ready") == 1
    assert shown(names.SERVICE_PHASE, service="router", process="r1", phase="starting") is None
    assert shown(names.DISK_FREE, service="router", process="r1", folder="nats") == 3
    assert shown(names.DISK_SIZE, service="router", process="r1", folder="nats") == 9
    who = {"service": "router", "process": "r1"}
    assert shown(names.PROCESS_MEMORY, **who) == 5
    assert shown(names.PROCESS_CPU, **who) == 1.5
    assert (shown(names.PROCESS_OPEN_FDS, **who), shown(names.PROCESS_MAX_FDS, **who)) == (7, 8)
    assert shown(names.PROCESS_LOOP_LAG, **who) == 0.25
    assert shown(names.PROCESS_REFUSED, **who) == 6


def test_label_values_are_bounded():
    one = metrics()
    for number in range(WORKERS_MAX + 10):
        one.load_reported(load(f"w{number}"), 1.0)
        one.request_finished(request(model=f"m{number}", mode=f"mode{number}", reason=f"reason{number}"), 1.0)

    assert len(one.workers) == WORKERS_MAX
    assert len(one.requests.latencies) <= 65
    assert {reason for _model, reason in one.requests.failed} == {"other"}


def test_unknown_model_names_do_not_displace_served_models():
    one = metrics()
    for number in range(100):
        one.request_finished(request(model=f"invented-{number}", status=404, reason="model_unknown"), 1.0)
    one.request_finished(request(model="true"), 1.0)
    shown = Shown(one, 1.0)

    assert shown(names.FLEET_REQUESTS, model="true", mode="disaggregated", status="200") == 1
    assert shown(names.FLEET_REQUESTS, model="other", mode="disaggregated", status="404") == 100


def test_a_new_worker_replaces_the_longest_silent_one():
    one = metrics()
    for number in range(WORKERS_MAX):
        one.load_reported(load(f"w{number}"), 1.0 + number / WORKERS_MAX)
    one.load_reported(load("new"), 20.0)

    assert "new" in one.workers
    assert "w0" not in one.workers


def test_every_fleet_worker_and_process_metric_is_shown_under_its_name():
    one = metrics()
    told = {family.metric.name for family in families(one, BusCounts(), 0.0)}

    ours = {name for name in names.METRICS if name.startswith(("baton_worker_", "baton_fleet_", "baton_service_"))}
    assert ours <= told
    assert told <= set(names.METRICS)
