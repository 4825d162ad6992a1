"""Which traces the OpenTelemetry Collector's tail sampling keeps.

The Collector does not run here: ``keeps`` implements the policy types that its configuration uses.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from services.router.settings import Settings
from services.router.telemetry.outcome import Kept
from shared.telemetry.span_names import Attribute
from tests.unit.observability.expressions import ROOT

SAMPLING = yaml.safe_load((ROOT / "otel-collector.yaml").read_text())["processors"]["tail_sampling"]
POLICIES = {policy["name"]: policy for policy in SAMPLING["policies"]}
BY_CHANCE = {"rate_limiting", "probabilistic"}
A_REQUEST: dict[str, Any] = {Attribute.KEPT: "share", Attribute.RESUMES: 0}


def keeps(policy: dict[str, Any], spans: list[dict[str, Any]], status: str = "UNSET") -> bool:
    """Whether a policy keeps a trace of spans with these attributes."""
    rule = policy[policy["type"]]
    match policy["type"]:
        case "string_attribute":
            return any(span.get(rule["key"]) in rule["values"] for span in spans)
        case "numeric_attribute":
            values = [span[rule["key"]] for span in spans if rule["key"] in span]
            return any(rule["min_value"] <= value <= rule["max_value"] for value in values)
        case "status_code":
            return status in rule["status_codes"]
    raise AssertionError(policy["type"])


def always_kept(*spans: dict[str, Any], status: str = "UNSET") -> bool:
    return any(keeps(policy, list(spans), status) for policy in POLICIES.values() if policy["type"] not in BY_CHANCE)


@pytest.mark.parametrize("why", [why for why in Kept if why is not Kept.SHARE])
def test_traces_that_the_router_kept_for_a_reason_are_kept(why: Kept):
    assert always_kept({}, {**A_REQUEST, Attribute.KEPT: why.value})


def test_traces_of_resumed_and_failed_requests_are_kept():
    assert always_kept({**A_REQUEST, Attribute.RESUMES: 1})
    assert always_kept(A_REQUEST, status="ERROR")


def test_other_traces_are_kept_at_a_limited_rate():
    assert not always_kept({}, A_REQUEST)
    chances = [policy for policy in POLICIES.values() if policy["type"] in BY_CHANCE]
    assert [policy["type"] for policy in chances] == ["rate_limiting"]
    assert 0 < chances[0]["rate_limiting"]["spans_per_second"] <= 1000


def test_the_decision_waits_for_the_longest_request():
    assert SAMPLING["decision_wait"].endswith("s")
    assert float(SAMPLING["decision_wait"].removesuffix("s")) > Settings().request_s_max
    assert float(SAMPLING["decision_wait_after_root_received"].removesuffix("s")) > 0


def test_policies_use_existing_attributes():
    keys = {policy[policy["type"]].get("key") for policy in POLICIES.values()} - {None}

    assert keys <= {attribute.value for attribute in Attribute}


def test_tail_sampling_runs_before_batching():
    pipelines = yaml.safe_load((ROOT / "otel-collector.yaml").read_text())["service"]["pipelines"]

    assert pipelines["traces"]["processors"] == ["memory_limiter", "tail_sampling", "batch"]
