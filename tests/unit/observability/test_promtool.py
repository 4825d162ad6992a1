"""promtool checks the Prometheus configuration and the alerts. Debian: apt-get install prometheus."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.observability.expressions import ALERTS, ROOT, selectors

PROMTOOL = shutil.which("promtool")
CASES = Path(__file__).parent / "alerts_test.yaml"
PROMTOOL_S_MAX = 180.0
WINDOW_S = 3600.0
"""The longest range in an expression."""
UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0}
NAME = re.compile(r"\w+")
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


@cache
def read_cases() -> dict[str, Any]:
    cases = yaml.safe_load(CASES.read_text())
    for case in cases["tests"]:
        case.setdefault("alert_rule_test", []).extend(
            {"eval_time": time, "alertname": alert, "exp_alerts": []}
            for time in case.pop("all_silent_at", [])
            for alert in rules()
        )
    return cases


def write_cases(folder: Path) -> list[str]:
    """A file for each case, with the annotations that promtool expects and the rules that the case names: promtool would
    evaluate all others as well, at each step of its time.
    """
    cases = copy.deepcopy(read_cases())
    files = []
    for number, case in enumerate(cases.pop("tests")):
        named = {expectation["alertname"] for expectation in case["alert_rule_test"]}
        for expectation in case["alert_rule_test"]:
            for alert in expectation["exp_alerts"]:
                rule = rules()[expectation["alertname"]]
                alert["exp_annotations"] = annotations(rule, alert["exp_labels"], alert.pop("value", "?"))
        chosen, file = folder / f"rules-{number}.yaml", folder / f"case-{number}.yaml"
        group = {"name": "alerts", "rules": [rule for name, rule in rules().items() if name in named]}
        chosen.write_text(yaml.safe_dump({"groups": [group]}))
        file.write_text(yaml.safe_dump({**cases, "rule_files": [str(chosen)], "tests": [case]}))
        files.append(str(file))
    return files


@needs_promtool
def test_the_configuration_is_valid():
    promtool("check", "config", "--syntax-only", str(ROOT / "prometheus" / "prometheus.yaml"))


@needs_promtool
@pytest.mark.slow
def test_each_alert_fires_exactly_in_its_cases(tmp_path):
    promtool("test", "rules", *write_cases(tmp_path))


@pytest.mark.parametrize("rule", rules().values(), ids=lambda rule: rule["alert"])
def test_an_alert_has_a_case_in_which_it_fires_and_one_with_all_its_series_in_which_it_never_does(rule):
    expected = [
        (case, [each for each in case["alert_rule_test"] if each["alertname"] == rule["alert"]])
        for case in read_cases()["tests"]
    ]
    used = {selector.name for selector in selectors(rule["expr"])}
    patient_s = seconds(rule.get("for", "0s")) + WINDOW_S

    assert any(each["exp_alerts"] for _, expectations in expected for each in expectations)
    assert any(
        used <= {NAME.match(series["series"])[0] for series in case["input_series"]}
        and not any(each["exp_alerts"] for each in expectations)
        and max(seconds(each["eval_time"]) for each in expectations) >= patient_s
        for case, expectations in expected
        if expectations
    )


def seconds(duration: str) -> float:
    """A duration as Prometheus writes it, such as 1m30s."""
    return sum(float(number) * UNITS_S[unit] for number, unit in re.findall(r"(\d+)([hms])", duration))


@pytest.mark.parametrize("rule", rules().values(), ids=lambda rule: rule["alert"])
def test_an_alert_has_summary_description_action_and_severity(rule):
    assert set(rule["annotations"]) == {"summary", "description", "action"}
    assert all(text.strip() for text in rule["annotations"].values())
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
