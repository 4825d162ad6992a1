"""Gauges under vLLM's names: what tools for vLLM read is there for each worker, and bounded."""

from __future__ import annotations

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from services.collector.metrics.exposition import BOUNDS, vllm_families
from services.collector.metrics.fleet_metrics import STALE_S_MAX, FleetMetrics
from shared.contracts.fleet_orders import NAME_CHARS_MAX
from shared.contracts.workers import ADAPTERS_MAX, FleetState, FleetWorker, Role, WorkerPhase, WorkerRecord
from shared.telemetry.prometheus import to_prometheus
from tests.support.fleet_builders import load, record

OF_W1 = {"model_name": "m", "engine": "w1", "worker_id": "w1", "role": "both"}


def fleet_of(*records: WorkerRecord) -> FleetState:
    workers = [FleetWorker(record=each, phase=WorkerPhase.READY, since_s=1.0, silent_s=0.0) for each in records]
    return FleetState(leader="o1", term=1, workers=workers)


def with_lora(worker_id: str = "w1") -> WorkerRecord:
    return msgspec.structs.replace(record(worker_id), adapters_at_once_max=2)


def metrics_of(*records: WorkerRecord) -> FleetMetrics:
    metrics = FleetMetrics(BOUNDS, 0.0)
    metrics.fleet.update(fleet_of(*records), 1.0)
    return metrics


def shown(metrics: FleetMetrics, now: float = 1.0, unix_s: float = 1e9) -> dict[str, list]:
    text = to_prometheus(vllm_families(metrics, now, unix_s))[0].decode()
    return {family.name: family.samples for family in text_string_to_metric_families(text)}


def test_load_and_cache_have_vllms_names_and_labels():
    metrics = metrics_of(record())
    metrics.load_reported(load(running=2, waiting=3, kv_tokens_used=30, kv_tokens_total=40), 1.0)

    page = shown(metrics)

    for name, value in (("num_requests_running", 2), ("num_requests_waiting", 3), ("kv_cache_usage_perc", 0.75)):
        (sample,) = page[f"vllm:{name}"]
        assert (sample.labels, sample.value) == (OF_W1, value)
    (cache,) = page["vllm:cache_config_info"]
    sizes = {"block_size": "32", "num_gpu_blocks": "100", "kv_cache_size_tokens": "3200"}
    assert cache.labels == OF_W1 | sizes | {"enable_prefix_caching": "True"}
    assert cache.value == 1


def test_lora_requests_have_one_series_with_the_adapters_of_now_and_the_time_of_the_report():
    metrics = metrics_of(with_lora())
    metrics.load_reported(load(adapters_running=["old"]), 1.0)
    metrics.load_reported(load(adapters_running=["sql", "mail"], adapters_waiting=["sql"]), 2.0)

    (lora,) = shown(metrics, now=4.0, unix_s=1e9)["vllm:lora_requests_info"]

    adapters = {"running_lora_adapters": "mail,sql", "waiting_lora_adapters": "sql"}
    assert lora.labels == OF_W1 | adapters | {"max_lora": "2"}
    assert lora.value == 1e9 - 2.0


def test_engines_without_lora_stores_and_silent_workers_have_none():
    metrics = metrics_of(record("plain"), record("store", role=Role.STORE), with_lora("silent"))
    metrics.load_reported(load("silent"), 0.0)
    metrics.load_reported(load("plain"), 5.0)
    metrics.load_reported(load("store", role=Role.STORE), 5.0)
    metrics.load_reported(load("not registered"), 5.0)

    page = shown(metrics, now=STALE_S_MAX + 1.0)

    assert [sample.labels["worker_id"] for sample in page["vllm:num_requests_running"]] == ["plain"]
    assert page["vllm:lora_requests_info"] == []


def test_workers_stay_while_no_orchestrator_leads():
    metrics = metrics_of(record())
    later = 2 * STALE_S_MAX
    metrics.load_reported(load(running=1), later)
    metrics.expire(later)

    assert metrics.fleet.state is None
    assert [sample.value for sample in shown(metrics, later)["vllm:num_requests_running"]] == [1]


def test_names_of_adapters_are_bounded_whatever_a_worker_reports():
    metrics = metrics_of(with_lora())
    metrics.load_reported(load(adapters_running=[f"{number:04}" + "x" * 10_000 for number in range(1000)]), 1.0)

    (lora,) = shown(metrics)["vllm:lora_requests_info"]

    assert len(lora.labels["running_lora_adapters"]) == ADAPTERS_MAX * (NAME_CHARS_MAX + 1) - 1
