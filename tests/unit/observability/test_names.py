"""Dashboards, alerts and configuration files refer only to metrics, labels, files and hosts that exist."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from scripts.make_pages import metrics_page
from shared.telemetry import names
from shared.telemetry.metrics import Kind, Metric
from shared.telemetry.names import METRICS
from tests.unit.observability.expressions import (
    DASHBOARDS,
    ROOT,
    alert_expressions,
    dashboard_expressions,
    grouped_labels,
    selectors,
)

PROMETHEUS_OWN = {"up": {"job", "instance"}}
SCRAPE_LABELS = {"job", "instance"}
EXPRESSIONS = [*alert_expressions(), *dashboard_expressions()]


def metric_of(series: str) -> tuple[Metric, set[str]] | None:
    """The metric of a series name, and the labels of the series."""
    if series in METRICS and METRICS[series].kind is not Kind.HISTOGRAM:
        return METRICS[series], set(METRICS[series].labels)
    for suffix, extra in (("_bucket", {"le"}), ("_sum", set()), ("_count", set())):
        metric = METRICS.get(series.removesuffix(suffix))
        if series.endswith(suffix) and metric is not None and metric.kind is Kind.HISTOGRAM:
            return metric, set(metric.labels) | extra
    return None


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=lambda each: each.where)
def test_an_expression_uses_existing_metrics_and_labels(expression):
    series_labels = []
    for selector in selectors(expression.promql):
        if selector.name in PROMETHEUS_OWN:
            labels = PROMETHEUS_OWN[selector.name]
        else:
            found = metric_of(selector.name)
            assert found is not None, f"{selector.name} is not in shared/telemetry/names.py"
            labels = found[1] | SCRAPE_LABELS
        series_labels.append(labels)
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels, f"{selector.name} has no label {matcher.name}"

    assert series_labels, "no series"
    for label in grouped_labels(expression.promql):
        assert any(label in labels for labels in series_labels), f"no series has a label {label}"


def test_every_metric_is_used_by_some_service():
    code = "".join(path.read_text() for path in (ROOT.parent / "services").rglob("*.py"))
    constants = {constant: metric for constant, metric in vars(names).items() if isinstance(metric, Metric)}

    assert [metric.name for constant, metric in constants.items() if f"names.{constant}" not in code] == []


def test_no_metric_has_a_label_that_prometheus_sets():
    assert not [metric.name for metric in METRICS.values() if SCRAPE_LABELS & set(metric.labels)]


def test_counters_are_used_only_in_rate_or_increase():
    for expression in dashboard_expressions():
        for selector in selectors(expression.promql):
            metric = METRICS.get(selector.name)
            if metric is None or metric.kind is not Kind.COUNTER:
                continue
            whole = expression.promql.replace(" ", "")
            assert f"rate({selector.name}" in whole or f"increase({selector.name}" in whole, expression.where


def test_the_metrics_page_is_up_to_date():
    assert (ROOT.parent / "docs/METRICS.md").read_text() == metrics_page(), "make catalogue"


def test_panels_do_not_overlap_and_have_unique_ids():
    for page in DASHBOARDS.values():
        taken = set()
        panels = page["panels"]
        for panel in panels:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, panel["title"]
            assert place["x"] + place["w"] <= 24
            taken |= cells
        assert len({panel["id"] for panel in panels}) == len(panels)


def yaml_of(path: Path):
    return yaml.safe_load(path.read_text())


def test_panels_query_only_provisioned_datasources():
    uids = {each["uid"] for each in yaml_of(ROOT / "grafana/provisioning/datasources/baton.yaml")["datasources"]}
    panels = [panel for page in DASHBOARDS.values() for panel in page["panels"]]
    used = {each["datasource"]["uid"] for panel in panels for each in (panel, *panel["targets"])}

    assert used <= uids


def test_the_otel_collector_uses_exactly_the_components_it_declares():
    config = yaml_of(ROOT / "otel-collector.yaml")
    for part in ("receivers", "processors", "exporters"):
        used = {name for pipeline in config["service"]["pipelines"].values() for name in pipeline[part]}
        assert used == set(config[part])
    assert set(config["service"]["extensions"]) == set(config["extensions"])
    assert set(config["service"]["pipelines"]) == {"traces", "metrics"}


def test_files_mounted_by_compose_exist():
    compose = yaml_of(ROOT.parent / "compose.yaml")
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume["source"] if isinstance(volume, dict) else volume.split(":")[0]
            if source.startswith("./"):
                assert (ROOT.parent / source).exists(), source


def test_hosts_in_configuration_files_are_compose_services():
    services = set(yaml_of(ROOT.parent / "compose.yaml")["services"])
    prometheus = yaml_of(ROOT / "prometheus/prometheus.yaml")
    hosts = set()
    for job in prometheus["scrape_configs"]:
        hosts |= {target.split(":")[0] for each in job.get("static_configs", []) for target in each["targets"]}
        hosts |= {name for each in job.get("dns_sd_configs", []) for name in each["names"]}

    assert hosts <= services
