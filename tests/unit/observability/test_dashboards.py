"""The dashboards have what Grafana needs to show every panel. Metrics and labels: ``test_names``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from shared.telemetry.names import METRICS
from shared.telemetry.span_names import SpanName
from tests.unit.observability.expressions import DASHBOARDS, ROOT, expanded, selectors

PANELS = [(name, panel) for name, page in DASHBOARDS.items() for panel in page["panels"]]
PROMETHEUS_LABEL = "instance"
"""The router of a series: each router exports its metrics, and Prometheus sets the label."""
EXPORTED = {"id", "version", "iteration", "annotations", "__inputs", "__requires", "__elements"}
"""Fields that Grafana adds to an export, and that differ from one Grafana to the next."""
VALUES_OF = re.compile(r"label_values\((\w+), (\w+)\)")
USED = re.compile(r'"\$(\w+)"')
UNITS = {"short", "s", "percentunit", "reqps", "bytes", "Bps"}

every_panel = pytest.mark.parametrize(
    "panel", [panel for _, panel in PANELS], ids=[f"{name}: {panel['title']}" for name, panel in PANELS]
)


def datasources() -> dict[str, dict]:
    provisioned = yaml.safe_load(Path(ROOT / "grafana/provisioning/datasources/baton.yaml").read_text())
    return {each["uid"]: each for each in provisioned["datasources"]}


def test_there_are_five_dashboards():
    titles = {page["title"] for page in DASHBOARDS.values()}

    assert titles == {f"Baton: {name}" for name in ("Fleet", "Requests", "KV exchange", "Placement", "Tenants")}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_file_has_the_form_in_which_an_export_is_kept(name):
    text = (ROOT / f"grafana/dashboards/{name}.json").read_text()
    page = DASHBOARDS[name]

    assert text == json.dumps(page, indent=1, ensure_ascii=False) + "\n"
    assert not EXPORTED & page.keys()
    assert not any("pluginVersion" in panel for panel in page["panels"])
    assert (page["uid"], page["editable"]) == (f"baton-{name}", False)


@every_panel
def test_a_panel_has_a_description_and_a_known_unit(panel):
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS


@every_panel
def test_thresholds_ascend(panel):
    steps = panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])
    values = [step["value"] for step in steps[1:]]

    assert values == sorted(values)
    assert not steps or steps[0]["value"] is None


@pytest.mark.parametrize("page", DASHBOARDS.values(), ids=DASHBOARDS)
def test_a_page_has_exactly_the_variables_that_its_panels_use(page):
    used = {name for panel in page["panels"] for target in panel["targets"] for name in USED.findall(target["expr"])}

    assert {each["name"] for each in page["templating"]["list"]} == used
    assert used, "no variables"


@pytest.mark.parametrize("page", DASHBOARDS.values(), ids=DASHBOARDS)
def test_a_variable_lists_the_values_of_a_label_of_its_metric(page):
    for variable in page["templating"]["list"]:
        metric, label = VALUES_OF.fullmatch(variable["query"]["query"]).groups()
        assert variable["definition"] == variable["query"]["query"]
        assert label == variable["name"]
        assert label in {*METRICS[metric].labels, PROMETHEUS_LABEL}
        assert variable["current"] == {"text": "All", "value": "$__all"}


@pytest.mark.parametrize("page", DASHBOARDS.values(), ids=DASHBOARDS)
def test_a_choice_at_the_top_of_a_page_applies_to_all_of_its_panels(page):
    variables = {each["name"] for each in page["templating"]["list"]}
    for panel in page["panels"]:
        for target in panel["targets"]:
            found = list(selectors(expanded(target["expr"])))
            labels = {label for each in found for label in labels_of(each.name)}
            filtered = {matcher.name for each in found for matcher in each.matchers.matchers}
            assert not (labels & variables) - filtered, f"{panel['title']}: {target['expr']}"


def labels_of(series: str) -> set[str]:
    """The labels of a series that a page may have variables for."""
    metric = METRICS.get(series) or METRICS[re.sub("_(bucket|sum|count)$", "", series)]
    return {*metric.labels, *([PROMETHEUS_LABEL] if series.startswith("baton_router_") else [])}


def test_histograms_show_exemplars_that_link_to_traces():
    targets = [target for _, panel in PANELS for target in panel["targets"]]
    (destination,) = datasources()["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]

    assert all(target["exemplar"] == ("_bucket" in target["expr"]) for target in targets)
    assert destination["name"] == "trace_id"
    assert destination["datasourceUid"] in datasources()


@pytest.mark.parametrize("title", ["TTFT", "ITL", "E2E", "TPOT", "Errors", "TTFT by decode worker"])
def test_a_click_on_a_latency_searches_traces_of_that_time(title):
    (panel,) = [each for _, each in PANELS if each["title"] == title]
    (link,) = panel["fieldConfig"]["defaults"]["links"]
    parameters = parse_qs(urlsplit(link["url"]).query)
    pane = json.loads(parameters["panes"][0])["traces"]

    assert pane["datasource"] in datasources()
    assert pane["range"] == {"from": "${__from}", "to": "${__to}"}
    (query,) = pane["queries"]
    names = set(re.findall(r'(?<!\.)name = "([^"]+)"', query["query"]))
    assert names <= set(SpanName)
    assert names or "kind = server" in query["query"]  # The span of a request is named by its method and path.
    assert re.fullmatch(r"\{ .+ \}", query["query"])
