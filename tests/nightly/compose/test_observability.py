"""The profile `observability`: its programs run with the configuration of this repository, and show a request.

Without a registry of images only Prometheus runs, as Debian has it: Debian, PyPI and npm have no Grafana, Tempo or
OpenTelemetry Collector. ``tests/nightly/observability/test_trace_store.py`` has a store of traces that npm has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.nightly.compose.conftest import POLL_S, SERVICES, UP_S_MAX, Compose, running, wait_until_ready, why_missing
from tests.support.nats_server import free_port
from tests.unit.observability.expressions import DASHBOARDS, alert_expressions, dashboard_expressions, operands

pytestmark = pytest.mark.compose

PROGRAMS = [name for name, service in SERVICES.items() if "observability" in service.get("profiles", [])]
OURS = ("router", "orchestrator", "collector", "sim-prefill", "sim-decode")
SEEN_S_MAX = 120.0
"""Several scrapes, and the Collector's wait for the rest of a trace."""
LATENCY = "baton_router_time_to_first_token_seconds_bucket"


@pytest.fixture(scope="module")
def missing(docker: dict[str, str]) -> dict[str, str]:
    """Programs whose image cannot be had here, and why."""
    found = {name: why_missing(SERVICES[name]["image"], docker) for name in PROGRAMS}
    return {name: why for name, why in found.items() if why}


@pytest.fixture(scope="module")
def system(docker: dict[str, str], missing: dict[str, str]) -> Iterator[Compose]:
    """With one request that Prometheus has seen."""
    if "prometheus" in missing:
        pytest.skip(missing["prometheus"])
    given = {"PROMETHEUS_PORT": str(free_port()), "GRAFANA_PORT": str(free_port())}
    given |= {"BATON_OTLP_ENDPOINT": "http://otel-collector:4318", "BATON_TRACE_SAMPLE_RATIO": "1"}
    with running(docker, "simulated,observability", **given) as compose:
        started = [*OURS, *(name for name in PROGRAMS if not missing.keys() & {name, *needs(name)})]
        compose.run("up", "--detach", "--wait", "--build", *started, timeout=UP_S_MAX)
        wait_until_ready(compose)
        body = {"model": "baton-tiny", "prompt": "Once upon a time " * 30, "max_tokens": 12}
        assert httpx.post(f"{compose.endpoint}/v1/completions", json=body, timeout=60).status_code == 200
        until(lambda: exemplars(compose))
        yield compose


def needs(name: str) -> list[str]:
    return list(SERVICES[name].get("depends_on", []))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SEEN_S_MAX
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(POLL_S)


def prometheus(system: Compose, path: str, **parameters: str) -> Any:
    url = f"http://127.0.0.1:{system.environment['PROMETHEUS_PORT']}/api/v1/{path}"
    try:
        answer = httpx.get(url, params=parameters, timeout=10).json()
    except httpx.TransportError:  # It still starts.
        return []
    assert answer["status"] == "success", (parameters, answer)
    return answer["data"]


def exemplars(system: Compose) -> list[str]:
    """The traces that dots on the graph of latencies lead to."""
    now = time.time()
    found = prometheus(system, "query_exemplars", query=LATENCY, start=str(now - 600), end=str(now + 60))
    return [each["labels"]["trace_id"] for series in found for each in series["exemplars"]]


def expressions() -> list[str]:
    """Of all panels and alerts."""
    alerts = [part for each in alert_expressions() for part in operands(each.promql)]
    return [each.promql for each in dashboard_expressions()] + alerts


def test_prometheus_finds_and_reads_the_collector_and_every_router(system: Compose):
    def health() -> dict[str, str]:
        targets = prometheus(system, "targets", state="active")["activeTargets"]
        return {target["labels"]["job"]: target["health"] for target in targets}

    until(lambda: {health().get(job) for job in ("baton-collector", "baton-router")} == {"up"})


def test_every_query_of_dashboards_and_alerts_is_valid_with_the_names_of_this_fleet(system: Compose):
    for promql in expressions():
        prometheus(system, "query", query=promql)
    until(lambda: prometheus(system, "query", query='sum(baton_fleet_workers{phase="ready"}) == 2')["result"])


def grafana(system: Compose, path: str, **parameters: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{system.environment['GRAFANA_PORT']}/{path}", params=parameters, timeout=30)


@pytest.fixture
def whole(missing: dict[str, str], system: Compose) -> Compose:
    """With all programs of the profile."""
    if missing:
        pytest.skip("; ".join(missing.values()))
    until(lambda: grafana(system, "api/health").status_code == httpx.codes.OK)
    return system


def test_the_collector_takes_its_configuration(missing: dict[str, str], system: Compose):
    if "otel-collector" in missing:
        pytest.skip(missing["otel-collector"])
    system.run("run", "--rm", "-T", "--no-deps", "otel-collector", "validate", "--config=/etc/otelcol/baton.yaml")


def test_grafana_finds_the_trace_of_an_exemplar_in_tempo(whole: Compose):
    trace_id = exemplars(whole)[0]
    path = f"api/datasources/proxy/uid/tempo/api/traces/{trace_id}"

    until(lambda: (answer := grafana(whole, path)).is_success and "baton-worker" in answer.text)

    text = grafana(whole, path).text
    assert "baton-router" in text
    assert "POST /v1/completions" in text


def test_grafana_has_every_dashboard_and_answers_their_queries(whole: Compose):
    titles = {found["title"] for found in grafana(whole, "api/search", type="dash-db").json()}

    assert len(titles) == len(DASHBOARDS)
    for promql in expressions():
        answer = grafana(whole, "api/datasources/proxy/uid/prometheus/api/v1/query", query=promql)
        assert answer.json()["status"] == "success", (promql, answer.text)
