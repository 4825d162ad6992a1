"""Gauges of each worker under vLLM's own names, as gateways, autoscalers and dashboards for vLLM read them.

Names, values and labels are those of vLLM 0.32 (``vllm/v1/metrics/loggers.py``), as far as they are read: vLLM's
``cache_config_info`` has every option of its cache as a label. ``engine`` is the worker's id: here one page has the
series of many engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from services.collector.metrics.exposition import kv_used
from services.collector.metrics.fleet_metrics import FleetMetrics, WorkerView
from shared.contracts.adapters import NAME_CHARS_MAX
from shared.contracts.workers import ADAPTERS_MAX, Role, WorkerRecord
from shared.telemetry import names
from shared.telemetry.metrics import Metric
from shared.telemetry.prometheus import Family, Sample

NUMBERS: Mapping[Metric, Callable[[WorkerView], float]] = {
    names.VLLM_RUNNING: lambda view: float(view.load.running),
    names.VLLM_WAITING: lambda view: float(view.load.waiting),
    names.VLLM_KV_USED: kv_used,
}


def vllm_families(metrics: FleetMetrics, now: float, unix_s: float) -> Iterator[Family]:
    """The gauges of all engines that report and whose record is known. ``unix_s`` is ``now`` on the wall clock."""
    known = [
        (record, view)
        for worker_id, view in metrics.live_workers(now).items()
        if (record := metrics.fleet.records.get(worker_id)) is not None and view.load.role is not Role.STORE
    ]
    for metric, read in NUMBERS.items():
        yield Family(metric, [Sample(_labels(record, view), read(view)) for record, view in known])
    yield Family(names.VLLM_CACHE_CONFIG, [Sample(_cache_labels(record, view), 1.0) for record, view in known])
    yield Family(
        names.VLLM_LORA_REQUESTS,
        [
            Sample(_lora_labels(record, view), unix_s - (now - view.heard))
            for record, view in known
            if record.adapters_at_once_max > 0
        ],
    )


def _labels(record: WorkerRecord, view: WorkerView) -> tuple[str, ...]:
    return record.model, record.worker_id, record.worker_id, view.load.role.value


def _cache_labels(record: WorkerRecord, view: WorkerView) -> tuple[str, ...]:
    block_size, blocks = record.hashing.block_size, record.kv_blocks
    sizes = (str(block_size), str(blocks), str(block_size * blocks), str(record.prefix_caching))
    return (*_labels(record, view), *sizes)


def _lora_labels(record: WorkerRecord, view: WorkerView) -> tuple[str, ...]:
    load = view.load
    running, waiting = _joined(load.adapters_running), _joined(load.adapters_waiting)
    return (*_labels(record, view), str(record.adapters_at_once_max), running, waiting)


def _joined(adapters: Iterable[str]) -> str:
    """As many names, and as long ones, as a worker can have, whatever a faulty one reports."""
    return ",".join(name[:NAME_CHARS_MAX] for name in sorted(set(adapters))[:ADAPTERS_MAX])
