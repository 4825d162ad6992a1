"""The fleet's metrics under their Prometheus names, and gauges of each worker under vLLM's own names, as gateways,
autoscalers and dashboards for vLLM read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from services.collector.console.tables import KeyMonth
from services.collector.metrics.fleet_metrics import (
    Bounds,
    FleetMetrics,
    Handoffs,
    InRole,
    PlanView,
    Requests,
    WorkerView,
)
from services.collector.metrics.windows import Histogram
from shared.bus.port import BusCounts
from shared.contracts.control import ServiceStatus
from shared.contracts.fleet_orders import NAME_CHARS_MAX
from shared.contracts.kv_events import KvTier
from shared.contracts.kv_exchange import KvExchangeState
from shared.contracts.load import StoreState
from shared.contracts.usage import UsageCounts
from shared.contracts.workers import ADAPTERS_MAX, FleetWorker, Role, WorkerRecord
from shared.telemetry import names
from shared.telemetry.metrics import Metric
from shared.telemetry.prometheus import Distribution, Family, Sample

BOUNDS = Bounds(
    ttft=names.FLEET_TTFT.buckets,
    itl=names.FLEET_ITL.buckets,
    e2e=names.FLEET_E2E.buckets,
    kv=names.FLEET_KV_READ.buckets,
)
PROMPT_SOURCES = {"computed": "computed_tokens", "cached": "cached_tokens", "received": "received_tokens"}


WORKER_NUMBERS: Mapping[Metric, Callable[[WorkerView, float], float]] = {
    names.WORKER_RUNNING: lambda view, _now: view.load.running,
    names.WORKER_WAITING: lambda view, _now: view.load.waiting,
    names.WORKER_WAITING_TOKENS: lambda view, _now: view.load.waiting_tokens,
    names.WORKER_LEGS: lambda view, _now: view.load.legs,
    names.WORKER_KV_USED: lambda view, _now: view.load.kv_used,
    names.WORKER_PREFILL_SPEED: lambda view, _now: view.load.prefill_tokens_per_s,
    names.WORKER_TOKEN_INTERVAL: lambda view, _now: view.load.decode_s_per_token,
    names.WORKER_TOKENS_IN: lambda view, now: view.tokens_in.per_second(now),
    names.WORKER_TOKENS_OUT: lambda view, now: view.tokens_out.per_second(now),
}
"""Gauges with one value per worker."""
WORKER_TOTALS: Mapping[Metric, str] = {
    names.WORKER_GENERATION_TOKENS: "generation_tokens",
    names.WORKER_RECEIVED_BYTES: "received_bytes",
    names.WORKER_RECEIVED_SECONDS: "received_seconds",
    names.WORKER_PREEMPTIONS: "preemptions",
    names.WORKER_STEP_SECONDS: "step_seconds",
}
"""Counters with one value per worker and role, and which of its totals they are."""
EXCHANGE_NUMBERS: Mapping[Metric, Callable[[KvExchangeState], float]] = {
    names.WORKER_LEASES_HELD: lambda exchange: exchange.leases,
    names.WORKER_PINNED: lambda exchange: exchange.pinned_blocks,
    names.WORKER_READS_RUNNING: lambda exchange: exchange.reads,
}
USAGE_KINDS: Mapping[str, Callable[[UsageCounts], int]] = {
    "prompt": lambda total: total.prompt_tokens,
    "cached": lambda total: total.cached_tokens,
    "completion": lambda total: total.completion_tokens,
}
LEASE_OUTCOMES = ("granted", "refused", "released", "expired")
HOST, DISK, OBJECT = KvTier.HOST.value, KvTier.DISK.value, KvTier.OBJECT.value
STORE_NUMBERS: Mapping[Metric, Callable[[StoreState], Mapping[str, int]]] = {
    names.STORE_BLOCKS: lambda store: {HOST: store.host_blocks, DISK: store.disk_blocks, OBJECT: store.object_blocks},
    names.STORE_BLOCKS_MAX: lambda store: {
        HOST: store.host_blocks_max,
        DISK: store.disk_blocks_max,
        OBJECT: store.object_blocks_max,
    },
    names.STORE_BYTES: lambda store: {
        HOST: store.host_blocks * store.block_bytes,
        DISK: store.disk_blocks * store.block_bytes,
        OBJECT: store.object_blocks * store.block_bytes,
    },
    names.STORE_WAITING: lambda store: {"load": store.loads_waiting, "save": store.saves_waiting},
}
"""A store's present state, by tier or by kind of copy."""
STORE_OUTCOMES: Mapping[Metric, Mapping[tuple[str, ...], str]] = {
    names.STORE_MOVED: {
        ("load", "done"): "loaded_blocks",
        ("load", "damaged"): "damaged_blocks",
        ("save", "done"): "saved_blocks",
        ("save", "failed"): "unsaved_blocks",
    },
    names.STORE_EVICTED: {
        (HOST,): "evicted_host_blocks",
        (DISK,): "evicted_disk_blocks",
        (OBJECT,): "evicted_object_blocks",
    },
    names.STORE_GRANTED: {(): "granted_bytes"},
}
"""Label values -> total of the store."""
PROCESS_NUMBERS: Mapping[Metric, Callable[[ServiceStatus], float]] = {
    names.PROCESS_MEMORY: lambda status: status.process.rss_bytes,
    names.PROCESS_CPU: lambda status: status.process.cpu_s,
    names.PROCESS_OPEN_FDS: lambda status: status.process.open_files,
    names.PROCESS_MAX_FDS: lambda status: status.process.open_files_max,
    names.PROCESS_LOOP_LAG: lambda status: status.process.loop_lag_s,
    names.PROCESS_REFUSED: lambda status: status.refused_connections,
}
LATENCIES = (
    (names.WORKER_TTFT, names.FLEET_TTFT, attrgetter("ttft")),
    (names.WORKER_ITL, names.FLEET_ITL, attrgetter("itl")),
    (names.WORKER_E2E, names.FLEET_E2E, attrgetter("e2e")),
)
"""Metric of a worker, metric of the fleet, and which of the latencies both have."""


def families(metrics: FleetMetrics, bus: BusCounts, now: float) -> list[Family]:
    return [
        *_workers(metrics, now),
        *_exchange(metrics, now),
        *_stores(metrics, now),
        *_fleet(metrics),
        *_plans(metrics.plans),
        *_requests(metrics.requests, now),
        *_services(metrics),
        *_bus(bus),
    ]


def usage_families(largest: Sequence[KeyMonth]) -> list[Family]:
    """Usage of the month by these keys and models."""
    of = [((entry.tenant, entry.key, entry.model), total) for entry, total, _tokens in largest]
    budgets = {
        (entry.tenant, entry.key): used / entry.monthly_tokens
        for entry, _total, used in largest
        if entry.monthly_tokens
    }
    return [
        Family(
            names.USAGE_TOKENS,
            [Sample((*labels, kind), float(pick(total))) for labels, total in of for kind, pick in USAGE_KINDS.items()],
        ),
        Family(names.USAGE_REQUESTS, [Sample(labels, float(total.requests)) for labels, total in of]),
        Family(names.USAGE_ENGINE_SECONDS, [Sample(labels, total.prefill_s + total.decode_s) for labels, total in of]),
        Family(names.USAGE_BUDGET, [Sample(labels, ratio) for labels, ratio in budgets.items()]),
    ]


def _workers(metrics: FleetMetrics, now: float) -> Iterator[Family]:
    views = [((worker_id, view.load.role.value), view) for worker_id, view in metrics.live_workers(now).items()]
    for metric, read in WORKER_NUMBERS.items():
        yield Family(metric, [Sample(labels, float(read(view, now))) for labels, view in views])
    counted = _counted(metrics, now)
    for metric, total in WORKER_TOTALS.items():
        yield Family(metric, [Sample(labels, each.totals[total]) for labels, each in counted])
    yield Family(
        names.WORKER_PROMPT_TOKENS,
        [
            Sample((*labels, source), each.totals[total])
            for labels, each in counted
            for source, total in PROMPT_SOURCES.items()
        ],
    )
    yield Family(
        names.WORKER_REQUESTS,
        [Sample((*labels, mode), count) for labels, each in counted for mode, count in each.requests.items()],
    )
    yield Family(
        names.WORKER_FAILURES,
        [Sample((*labels, reason), count) for labels, each in counted for reason, count in each.failures.items()],
    )
    yield Family(
        names.WORKER_CACHED_MISSED, [Sample(labels, float(each.predictions.missed)) for labels, each in counted]
    )
    for metric, _of_fleet, pick in LATENCIES:
        yield Family(metric, [Sample(labels, _distribution(pick(each.latencies))) for labels, each in counted])


def _counted(metrics: FleetMetrics, now: float, *, exchange: bool = False) -> list[tuple[tuple[str, str], InRole]]:
    """Worker, role and what was counted in it, of each role that a worker has had; ``exchange``: only of those whose
    connector reports what it leases and reads.
    """
    return [
        ((worker_id, role.value), counted)
        for worker_id, view in metrics.live_workers(now).items()
        if not exchange or view.load.exchange is not None
        for role, counted in view.roles.items()
    ]


PREFETCHED_TOTALS = {"fetched": "prefetched_blocks", "used": "prefetch_used_blocks", "wasted": "prefetch_wasted_blocks"}


def _exchange(metrics: FleetMetrics, now: float) -> Iterator[Family]:
    exchanges = [
        ((worker_id, view.load.role.value), view.load.exchange)
        for worker_id, view in metrics.live_workers(now).items()
        if view.load.exchange is not None
    ]
    for metric, read in EXCHANGE_NUMBERS.items():
        yield Family(metric, [Sample(labels, float(read(exchange))) for labels, exchange in exchanges])
    counted = [(labels, each.totals) for labels, each in _counted(metrics, now, exchange=True)]
    leases, reads = [], []
    for labels, totals in counted:
        leases += [Sample((*labels, outcome), totals[f"leases_{outcome}"]) for outcome in LEASE_OUTCOMES]
        reads += [
            Sample((*labels, "done"), totals["reads"] - totals["reads_failed"]),
            Sample((*labels, "failed"), totals["reads_failed"]),
        ]
    copies = [
        Sample((*labels, outcome), totals[f"{outcome}_blocks"])
        for labels, totals in counted
        for outcome in ("copied", "lost")
    ]
    yield Family(names.WORKER_STORE_COPIES, copies)
    prefetched = [
        Sample((*labels, outcome), totals[total])
        for labels, totals in counted
        for outcome, total in PREFETCHED_TOTALS.items()
    ]
    yield Family(names.WORKER_PREFETCHED, prefetched)
    yield Family(names.WORKER_LEASES, leases)
    yield Family(names.WORKER_READS, reads)
    for metric, total in (
        (names.WORKER_REFUSED, "refused_requests"),
        (names.WORKER_RECOMPUTED, "recomputed_tokens"),
        (names.WORKER_FIRST_TOKENS, "first_tokens_received"),
        (names.WORKER_RECOMPUTE_SLOWED, "recompute_slowed_seconds"),
    ):
        yield Family(metric, [Sample(labels, totals[total]) for labels, totals in counted])


def _stores(metrics: FleetMetrics, now: float) -> Iterator[Family]:
    stores = [
        (worker_id, view.load.store, view.totals.values)
        for worker_id, view in metrics.live_workers(now).items()
        if view.load.store is not None
    ]
    for metric, read in STORE_NUMBERS.items():
        yield Family(
            metric,
            [
                Sample((worker_id, label), float(number))
                for worker_id, store, _totals in stores
                for label, number in read(store).items()
            ],
        )
    free = [(worker_id, store.disk_free_bytes) for worker_id, store, _totals in stores]
    yield Family(
        names.STORE_DISK_FREE, [Sample((each,), float(free_bytes)) for each, free_bytes in free if free_bytes >= 0]
    )
    for metric, outcomes in STORE_OUTCOMES.items():
        yield Family(
            metric,
            [
                Sample((worker_id, *labels), totals[total])
                for worker_id, _store, totals in stores
                for labels, total in outcomes.items()
            ],
        )


def _fleet(metrics: FleetMetrics) -> Iterator[Family]:
    state = metrics.fleet.state
    workers: list[FleetWorker] = state.workers if state else []
    named = [((each.record.worker_id, each.record.role.value), each) for each in workers]
    yield Family(names.WORKER_INFO, [Sample((*labels, each.record.model), 1.0) for labels, each in named])
    yield Family(names.WORKER_PHASE, [Sample((*labels, each.phase.value), 1.0) for labels, each in named])
    yield Family(names.WORKER_SILENCE, [Sample(labels, each.silent_s) for labels, each in named])
    yield Family(
        names.WORKER_LEGS_MAX,
        [Sample(labels, float(each.record.legs_max)) for labels, each in named if each.record.legs_max > 0],
    )
    yield Family(names.WORKER_KV_READ_SPEED, list(_read_speeds(named)))
    by_phase = Counter((each.record.model, each.record.role.value, each.phase.value) for each in workers)
    yield Family(names.FLEET_WORKERS, [Sample(labels, count) for labels, count in sorted(by_phase.items())])
    yield Family(names.FLEET_TERM, [Sample((), state.term)] if state else [])
    totals = metrics.worker_totals
    yield Family(
        names.FLEET_PROMPT_TOKENS, [Sample((source,), totals[total]) for source, total in PROMPT_SOURCES.items()]
    )
    yield from _unlabelled(
        {
            names.FLEET_WORKERS_LOST: metrics.fleet.workers_lost,
            names.FLEET_GENERATION_TOKENS: totals["generation_tokens"],
            names.FLEET_RECEIVED_BYTES: totals["received_bytes"],
        }
    )


def _read_speeds(named: Sequence[tuple[tuple[str, str], FleetWorker]]) -> Iterator[Sample]:
    registered = {each.record.worker_id for _labels, each in named}
    for labels, each in named:
        for read in each.record.reads_from(registered):
            yield Sample((*labels, read.source_id, read.memory.value), float(read.bytes_per_s))


def _plans(plans: PlanView) -> Iterator[Family]:
    yield Family(names.PLANNER_WANTED, [Sample(labels, float(wanted)) for labels, wanted in plans.wanted().items()])
    yield Family(names.PLANNER_LOAD, [Sample(labels, load) for labels, load in plans.load().items()])
    yield Family(names.PLANNER_CHANGES, [Sample(labels, float(count)) for labels, count in plans.changes.items()])


def _requests(requests: Requests, now: float) -> Iterator[Family]:
    yield Family(names.FLEET_REQUESTS, [Sample(labels, count) for labels, count in requests.finished.items()])
    yield Family(names.FLEET_FAILURES, [Sample(labels, count) for labels, count in requests.failed.items()])
    yield Family(
        names.FLEET_REQUEST_TOKENS, [Sample(labels, float(count)) for labels, count in requests.tokens.items()]
    )
    for _of_worker, metric, pick in LATENCIES:
        yield Family(metric, [Sample(labels, _distribution(pick(each))) for labels, each in requests.latencies.items()])
    yield from _handoffs(requests.handoffs)
    yield from _unlabelled(
        {
            names.FLEET_REQUEST_RATE: requests.rate.per_second(now),
            names.FLEET_TOKENS_IN: requests.prompt_tokens.per_second(now),
            names.FLEET_TOKENS_OUT: requests.completion_tokens.per_second(now),
            names.FLEET_CACHED_PREDICTED: requests.predictions.predicted,
            names.FLEET_CACHED_ACTUAL: requests.predictions.actual,
            names.FLEET_CACHED_MISSED: requests.predictions.missed,
        }
    )


def _handoffs(handoffs: Handoffs) -> Iterator[Family]:
    yield Family(names.FLEET_DRAFTS, [Sample(labels, count) for labels, count in handoffs.drafts.items()])
    yield Family(names.FLEET_HANDOFFS, [Sample((how,), count) for how, count in handoffs.count.items()])
    for metric, histograms in ((names.FLEET_KV_WAIT, handoffs.waits), (names.FLEET_KV_READ, handoffs.reads)):
        yield Family(metric, [Sample((how,), _distribution(each)) for how, each in histograms.items()])
    yield from _unlabelled(
        {
            names.FLEET_RECOMPUTED: handoffs.recomputed,
            names.FLEET_REPREFILLED: handoffs.reprefilled,
            names.FLEET_READBACK: handoffs.read_back,
        }
    )


def _services(metrics: FleetMetrics) -> Iterable[Family]:
    statuses = [status for status, _heard in metrics.services.values()]
    samples = [Sample((status.service, status.instance, status.phase.value), 1.0) for status in statuses]
    disks = [
        ((status.service, status.instance, folder.value), disk)
        for status in statuses
        for folder, disk in {disk.folder: disk for disk in status.disks}.items()
    ]
    return [
        *(
            Family(metric, [Sample((each.service, each.instance), float(read(each))) for each in statuses])
            for metric, read in PROCESS_NUMBERS.items()
        ),
        Family(names.SERVICE_PHASE, samples),
        Family(names.DISK_FREE, [Sample(labels, float(disk.free_bytes)) for labels, disk in disks]),
        Family(names.DISK_SIZE, [Sample(labels, float(disk.size_bytes)) for labels, disk in disks]),
    ]


def _bus(counts: BusCounts) -> Iterable[Family]:
    return _unlabelled(
        {
            names.BUS_DROPPED: counts.dropped,
            names.BUS_BAD: counts.bad_messages,
            names.BUS_PARTS_LOST: counts.parts_lost,
            names.BUS_RECONNECTS: counts.reconnects,
            names.BUS_CERTIFICATE_EXPIRES: counts.certificate_ends_at,
        }
    )


def _unlabelled(numbers: Mapping[Metric, float]) -> Iterable[Family]:
    return [Family(metric, [Sample((), float(number))]) for metric, number in numbers.items()]


def _distribution(histogram: Histogram) -> Distribution:
    return Distribution(tuple(histogram.counts), histogram.sum)


NUMBERS: Mapping[Metric, Callable[[WorkerView], float]] = {
    names.VLLM_RUNNING: lambda view: float(view.load.running),
    names.VLLM_WAITING: lambda view: float(view.load.waiting),
    names.VLLM_KV_USED: lambda view: view.load.kv_used,
}


def vllm_families(metrics: FleetMetrics, now: float, unix_s: float) -> Iterator[Family]:
    """The gauges of all engines that report and whose record is known. ``unix_s`` is ``now`` on the wall clock.

    Names, values and labels are those of vLLM 0.32 (``vllm/v1/metrics/loggers.py``), as far as they are read: vLLM's
    ``cache_config_info`` has every option of its cache as a label. ``engine`` is the worker's id: here one page has the
    series of many engines.
    """
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
            Sample(_adapter_labels(record, view), unix_s - (now - view.heard))
            for record, view in known
            if record.adapters_at_once_max > 0
        ],
    )


def _labels(record: WorkerRecord, view: WorkerView) -> tuple[str, ...]:
    return record.model, record.worker_id, record.worker_id, view.load.role.value


def _cache_labels(record: WorkerRecord, view: WorkerView) -> tuple[str, ...]:
    block_size, tokens = record.hashing.block_size, record.kv_tokens
    sizes = (str(block_size), str(tokens // block_size), str(tokens), str(record.prefix_caching))
    return (*_labels(record, view), *sizes)


def _adapter_labels(record: WorkerRecord, view: WorkerView) -> tuple[str, ...]:
    load = view.load
    running, waiting = _joined(load.adapters_running), _joined(load.adapters_waiting)
    return (*_labels(record, view), str(record.adapters_at_once_max), running, waiting)


def _joined(adapters: Iterable[str]) -> str:
    """As many names, and as long ones, as a worker can have, whatever a faulty one reports."""
    return ",".join(name[:NAME_CHARS_MAX] for name in sorted(set(adapters))[:ADAPTERS_MAX])
