"""Cores decide and do nothing else."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.sources import Source, sources

PURE = (
    "connector.holder.holder",
    "connector.holder.hot_chains",
    "connector.holder.leases",
    "connector.layout.compatibility",
    "connector.layout.routes",
    "connector.layout.tensors",
    "connector.reader.lease_request",
    "connector.reader.fetch",
    "connector.reader.fetch_plan",
    "connector.reader.peers",
    "connector.reader.prefetch",
    "connector.reader.reader",
    "connector.reader.token_counts",
    "connector.reader.block_progress",
    "connector.messages",
    "connector.scheduler.exchange_core",
    "connector.holder.pending_writes",
    "connector.orders",
    "connector.scheduler.rank_aggregation",
    "connector.scheduler.stats",
    "services.collector.console.decision",
    "services.collector.console.events",
    "services.collector.console.health",
    "services.collector.console.orders",
    "services.collector.console.requests",
    "services.collector.console.state",
    "services.collector.console.traffic",
    "services.collector.console.views",
    "services.collector.console.workers",
    "services.collector.metrics.engine_work",
    "services.collector.metrics.fleet_metrics",
    "services.collector.metrics.plans",
    "services.collector.metrics.requests",
    "services.collector.metrics.windows",
    "services.collector.report.aggregated",
    "services.collector.report.report",
    "services.collector.report.step_time",
    "services.launcher.cluster.folder",
    "services.launcher.cluster.key_entry",
    "services.launcher.doctor.facts",
    "services.launcher.doctor.findings",
    "services.launcher.doctor.installation",
    "services.launcher.doctor.services",
    "services.launcher.doctor.workers",
    "services.launcher.system.board",
    "services.launcher.system.devices",
    "services.launcher.system.failure_text",
    "services.launcher.system.plan",
    "services.launcher.system.restart",
    "services.launcher.system.scaling_steps",
    "services.launcher.system.sizes",
    "services.launcher.views.watch",
    "services.orchestrator.fleet.fleet",
    "services.orchestrator.fleet.lifecycle",
    "services.orchestrator.leadership.leadership",
    "services.orchestrator.planner.change",
    "services.orchestrator.planner.demand",
    "services.orchestrator.planner.engine_work",
    "services.orchestrator.planner.family",
    "services.orchestrator.planner.plan_log",
    "services.orchestrator.planner.planner",
    "services.orchestrator.planner.rules",
    "services.orchestrator.planner.speeds",
    "services.orchestrator.planner.steadiness",
    "services.orchestrator.planner.work",
    "services.router.admission.admission",
    "services.router.admission.fair_share",
    "services.router.admission.policy",
    "services.router.admission.queues",
    "services.router.admission.scheduling_pass",
    "services.router.auth.api_keys",
    "services.router.auth.rate_limit",
    "services.router.auth.tenant_salt",
    "services.router.placement.candidate",
    "services.router.placement.cost",
    "services.router.placement.decision",
    "services.router.placement.decision_log",
    "services.router.placement.evaluation",
    "services.router.placement.kv_sources",
    "services.router.placement.placement",
    "services.router.placement.placer",
    "services.router.placement.policy",
    "services.router.placement.request_fields",
    "services.router.placement.revisions",
    "services.router.placement.shortlist",
    "services.router.placement.slo",
    "services.router.relay.failure_policy",
    "services.router.relay.migration",
    "services.router.relay.timings",
    "services.router.state.block_table",
    "services.router.state.cluster_view",
    "services.router.state.engine_speed",
    "services.router.state.fleet_table",
    "services.router.state.native_block_table",
    "services.router.state.prefix_index",
    "services.router.state.reservations",
    "services.router.state.sent_work",
    "services.router.state.speed_learner",
    "services.router.state.speed_samples",
    "services.router.state.token_rate",
    "services.router.state.unit_costs",
    "services.router.telemetry.outcome",
    "services.router.telemetry.trace_sampling",
    "services.router.telemetry.ttft",
    "services.router.tokenize.block_hash",
    "services.router.tokenize.parity",
    "services.worker.engines.simulated.core",
    "services.worker.engines.simulated.core.batch",
    "services.worker.engines.simulated.core.block_cache",
    "services.worker.engines.simulated.core.block_hashes",
    "services.worker.engines.simulated.core.block_pool",
    "services.worker.engines.simulated.core.engine_core",
    "services.worker.engines.simulated.core.exchange",
    "services.worker.engines.simulated.core.link",
    "services.worker.engines.simulated.core.measures",
    "services.worker.engines.simulated.core.sequence",
    "services.worker.engines.simulated.core.settings",
    "services.worker.engines.simulated.core.timing",
    "services.worker.engines.simulated.core.tokens",
    "services.worker.engines.store",
    "services.worker.engines.store.block_shape",
    "services.worker.engines.store.file_tier",
    "services.worker.engines.store.kv_exchange",
    "services.worker.engines.store.slot_records",
    "services.worker.engines.store.tiers",
    "services.worker.kv_exchange.open_asks",
    "services.worker.kv_exchange.peers",
    "services.worker.legs.body",
    "services.worker.legs.capacity",
    "services.worker.legs.kv_order",
    "services.worker.legs.resume",
    "services.worker.kv_exchange.copy_targets",
    "services.worker.lifecycle.self_test",
    "services.worker.telemetry.kv_events",
    "services.worker.telemetry.step_totals",
    "shared.engine_speed",
    "shared.text",
    "shared.text.explanation",
    "shared.text.fleet_text",
    "shared.text.order_text",
    "shared.text.quantities",
)
"""Modules that decide and do nothing else."""
DECIDERS = tuple(module for module in PURE if module.startswith("connector."))
CORES = [source for source in sources() if source.module in PURE]
ALLOWED = {
    "__future__", "msgspec", "dataclasses", "enum", "typing", "collections", "math", "heapq", "bisect", "hashlib",
    "itertools", "functools", "operator", "struct", "array", "re", "json", "cbor2",
}  # fmt: skip
FOR_SPEED = {"numpy"}
"""Array arithmetic where a core would be too slow without it."""
REFUSED_CALLS = {"open", "print", "input", "exec", "eval", "__import__"}


def allowed(source: Source, module: str) -> bool:
    top = module.partition(".")[0]
    return (
        top in ALLOWED | FOR_SPEED
        or module.startswith("services.router.native.")
        or (module + ".").startswith(tuple(f"{name}." for name in (*PURE, "shared.contracts")))
    )


@pytest.mark.parametrize("source", CORES, ids=lambda source: source.path)
def test_a_core_imports_only_what_it_needs_to_decide(source):
    bases = [
        (f"{node.module}.{name.name}", node.lineno) if isinstance(node, ast.ImportFrom) else (name.name, node.lineno)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    ]

    assert [f"{source.path}:{line} {module}" for module, line in bases if not allowed(source, module)] == []


@pytest.mark.parametrize("source", CORES, ids=lambda source: source.path)
def test_a_core_neither_waits_nor_keeps_globals_nor_does_io(source):
    asynchronous = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)
    wrong = [
        f"{source.path}:{node.lineno} {type(node).__name__}"
        for node in ast.walk(source.tree)
        if isinstance(node, (*asynchronous, ast.Global))
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in REFUSED_CALLS)
    ]

    assert wrong == []
