"""promtool checks the Prometheus configuration and the alerts. Debian: apt-get install prometheus."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.observability.expressions import ALERTS, ROOT

PROMTOOL = shutil.which("promtool")
CASES = Path(__file__).parent / "alerts_test.yaml"
PROMTOOL_S_MAX = 180.0
VALUE = re.compile(r"\{\{ *\$value[^}]*\}\}")

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool on this machine")


def promtool(*arguments: str) -> None:
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=PROMTOOL_S_MAX, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@cache
def rules() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]}


def annotations(rule: dict[str, Any], labels: dict[str, str], value: str) -> dict[str, str]:
    """The alert's annotations with labels and value filled in."""
    filled = {}
    for name, text in rule["annotations"].items():
        shown = VALUE.sub(value, text)
        for label, content in labels.items():
            shown = shown.replace(f"{{{{ $labels.{label} }}}}", content)
        filled[name] = shown
    return filled


def complete_cases() -> dict[str, Any]:
    """The cases with the annotations that promtool expects."""
    cases = yaml.safe_load(CASES.read_text())
    for expectation in (each for case in cases["tests"] for each in case["alert_rule_test"]):
        for alert in expectation["exp_alerts"]:
            rule = rules()[expectation["alertname"]]
            alert["exp_annotations"] = annotations(rule, alert["exp_labels"], alert.pop("value", "?"))
    return {**cases, "rule_files": [str(ALERTS)]}


@needs_promtool
def test_the_configuration_is_valid():
    promtool("check", "config", "--syntax-only", str(ROOT / "prometheus" / "prometheus.yaml"))


@needs_promtool
@pytest.mark.slow
def test_each_alert_fires_exactly_in_its_cases(tmp_path):
    cases = tmp_path / "cases.yaml"
    cases.write_text(yaml.safe_dump(complete_cases()))

    promtool("test", "rules", str(cases))


def test_each_alert_has_a_firing_and_a_silent_case():
    expectations = [each for case in yaml.safe_load(CASES.read_text())["tests"] for each in case["alert_rule_test"]]

    for fires in (True, False):
        tested = {each["alertname"] for each in expectations if bool(each["exp_alerts"]) is fires}
        assert tested == set(rules()), fires


@pytest.mark.parametrize("rule", rules().values(), ids=lambda rule: rule["alert"])
def test_an_alert_has_summary_description_action_and_severity(rule):
    assert set(rule["annotations"]) == {"summary", "description", "action"}
    assert all(text.strip() for text in rule["annotations"].values())
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
