"""Prometheus itself reads our configuration and runs our alerts. Needs promtool (Debian: apt-get install prometheus)."""

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
    """What the alert says when it has these labels."""
    said = {}
    for name, text in rule["annotations"].items():
        shown = VALUE.sub(value, text)
        for label, content in labels.items():
            shown = shown.replace(f"{{{{ $labels.{label} }}}}", content)
        said[name] = shown
    return said


def whole_cases() -> dict[str, Any]:
    """The cases as promtool wants them: with every word that each alert says."""
    cases = yaml.safe_load(CASES.read_text())
    for expectation in (each for case in cases["tests"] for each in case["alert_rule_test"]):
        for alert in expectation["exp_alerts"]:
            rule = rules()[expectation["alertname"]]
            alert["exp_annotations"] = annotations(rule, alert["exp_labels"], alert.pop("value", "?"))
    return {**cases, "rule_files": [str(ALERTS)]}


@needs_promtool
def test_the_configuration_is_valid():
    promtool("check", "config", str(ROOT / "prometheus" / "prometheus.yaml"))


@needs_promtool
def test_each_alert_fires_when_it_should_and_only_then(tmp_path):
    cases = tmp_path / "cases.yaml"
    cases.write_text(yaml.safe_dump(whole_cases()))

    promtool("test", "rules", str(cases))


def test_no_alert_is_without_a_case_in_which_it_fires_and_one_in_which_it_does_not():
    expectations = [each for case in yaml.safe_load(CASES.read_text())["tests"] for each in case["alert_rule_test"]]

    for fires in (True, False):
        looked_at = {each["alertname"] for each in expectations if bool(each["exp_alerts"]) is fires}
        assert looked_at == set(rules()), fires


@pytest.mark.parametrize("rule", rules().values(), ids=lambda rule: rule["alert"])
def test_an_alert_says_what_is_wrong_what_that_means_and_what_to_do(rule):
    assert set(rule["annotations"]) == {"summary", "description", "action"}
    assert all(text.strip() for text in rule["annotations"].values())
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
