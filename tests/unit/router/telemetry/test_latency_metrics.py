"""Latency metrics: exemplars, inter-token gaps counted in bulk, bounded labels."""

from __future__ import annotations

import random

import httpx
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from services.router.admission.queue_metrics import OTHER_TENANTS, TENANTS_NAMED_MAX, QueueMetrics
from services.router.telemetry.metrics import GapMetrics
from services.router.telemetry.outcome import TargetOutcome
from services.router.telemetry.request_metrics import UNCOUNTED_GAPS_MAX, RequestMetrics, StreamGaps
from shared.contracts.ids import RequestId
from shared.contracts.inference import RequestFinished
from shared.telemetry import names
from tests.unit.router.telemetry.test_tracing import UNWANTED, WANTED, Drawings, takes_time
from tests.unit.router.world import World, in_world, prompt

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def finished(trace_id: str = "", **fields) -> RequestFinished:
    values = {"status": 200, "ttft_s": 0.2, "itl_s": 0.02, "e2e_s": 1.0, **fields}
    return RequestFinished(
        request_id=RequestId("r"), model="m", path="/", mode="aggregated", trace_id=trace_id, **values
    )


def examples(registry: CollectorRegistry) -> dict[str, list[tuple[str, float]]]:
    """By metric: the trace id and value of each exemplar."""
    return {
        family.name: found
        for family in text_string_to_metric_families(openmetrics(registry).decode())
        if (
            found := [
                (sample.exemplar.labels["trace_id"], sample.exemplar.value)
                for sample in family.samples
                if sample.exemplar is not None
            ]
        )
    }


def test_exemplars_refer_only_to_kept_traces():
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, {})
    metrics.finished(finished(), None, 0.5)

    assert examples(registry) == {}

    metrics.finished(finished("ab" * 16, ttft_s=3.0), None, 0.3)
    assert examples(registry) == {
        names.ROUTER_TTFT.name: [("ab" * 16, 3.0)],
        names.ROUTER_TPOT.name: [("ab" * 16, 0.02)],
        names.ROUTER_E2E.name: [("ab" * 16, 1.0)],
        names.ROUTER_ITL.name: [("ab" * 16, 0.3)],
    }


def test_bulk_counting_of_gaps_equals_counting_singly():
    dice, gaps, singly, bulk = random.Random(3), StreamGaps(), CollectorRegistry(), CollectorRegistry()
    reference = Histogram("x", "x", ("mode",), buckets=names.ROUTER_ITL.buckets, registry=singly)
    for gap_s in [*(dice.expovariate(20.0) for _ in range(3 * UNCOUNTED_GAPS_MAX)), *names.ROUTER_ITL.buckets]:
        reference.labels("aggregated").observe(gap_s)
        gaps.of["aggregated"].noted.append(gap_s)
        gaps.ended("aggregated", gap_s, "")
    bulk.register(GapMetrics(gaps.of))

    def values(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
        return {
            (sample.name.rpartition("_")[2], sample.labels.get("le", "")): pytest.approx(sample.value)
            for family in registry.collect()
            for sample in family.samples
            if sample.labels["mode"] == "aggregated"
        }

    assert len(gaps.of["aggregated"].noted) <= UNCOUNTED_GAPS_MAX
    assert values(bulk) == values(singly)


@in_world(sink=Drawings(0.0))
async def test_streams_report_inter_token_latency(world: World):
    await world.worker("w1", script=takes_time)
    await world.ask(prompt(stream=True), traceparent=WANTED)
    await world.ask(prompt(stream=True), traceparent=UNWANTED)
    registry = world.router.registry
    assert registry.get_sample_value(f"{names.ROUTER_ITL.name}_count", {"mode": "aggregated"}) == 2
    assert registry.get_sample_value(f"{names.ROUTER_ITL.name}_sum", {"mode": "aggregated"}) == pytest.approx(0.6)
    (example,) = examples(registry)[names.ROUTER_ITL.name]
    assert example == (WANTED.split("-")[1], pytest.approx(0.3))


@in_world()
async def test_openmetrics_is_served_on_request_and_otherwise_plain_text(world: World):
    transport = httpx.ASGITransport(world.router.edge)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        plain = await client.get("/metrics")
        open_one = await client.get("/metrics", headers={"accept": f"{OPENMETRICS},text/plain;q=0.1"})

    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert open_one.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    shown = {family.name for family in text_string_to_metric_families(open_one.text)}
    assert {names.ROUTER_TTFT.name, names.ROUTER_TPOT.name, names.ROUTER_ITL.name} <= shown


def test_goodput_counts_requests_that_met_their_targets():
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, {})
    for one in (finished(ttft_target_s=1.0), finished(ttft_target_s=0.1), finished(), finished(ttft_target_s=1.0)):
        metrics.finished(one, None, 0.0)

    seen = {goal: registry.get_sample_value(names.ROUTER_GOALS.name, {"goal": goal}) for goal in ("met", "ttft_missed")}
    assert seen == {"met": 2, "ttft_missed": 1}


def test_lines_of_batches_count_in_no_latency():
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, {})
    for one in (
        finished(),
        finished(is_batch=True, ttft_s=3600.0),
        finished(is_batch=True, status=503, reason="overloaded", ttft_s=-1.0),
    ):
        metrics.finished(one, None, 0.1)

    def total(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"mode": "aggregated", **labels})

    timed = (names.ROUTER_TTFT, names.ROUTER_TPOT, names.ROUTER_E2E)
    assert [total(f"{each.name}_count") for each in timed] == [1, 1, 1]
    assert [total(names.ROUTER_REQUESTS.name, status=status) for status in ("200", "503")] == [2, 1]
    goals = [registry.get_sample_value(names.ROUTER_GOALS.name, {"goal": goal}) for goal in TargetOutcome]
    assert sum(goals) == 1


def test_tenant_series_are_bounded():
    registry = CollectorRegistry()
    metrics = QueueMetrics(registry, queue_max=10)
    before = len(generate_latest(registry).splitlines())

    metrics.ended("tenant-0", "", 1, 1)
    of_one = len(generate_latest(registry).splitlines()) - before
    for number in range(10_000):
        metrics.ended(f"tenant-{number}", "", 1, 1)

    assert len(generate_latest(registry).splitlines()) - before <= (TENANTS_NAMED_MAX + 1) * of_one
    shown = {sample.labels.get("tenant") for family in registry.collect() for sample in family.samples}
    assert {"tenant-0", f"tenant-{TENANTS_NAMED_MAX - 1}", OTHER_TENANTS} <= shown
    label = {"tenant": OTHER_TENANTS, "outcome": "ok"}
    assert registry.get_sample_value(names.ROUTER_TENANT_REQUESTS.name, label) == 10_000 - TENANTS_NAMED_MAX
