"""A pytest plugin: writes one JSON line per finished test to the file $OUTCOME_LINES, so that a run that is cut off by its
deadline loses only the tests that it did not reach. Tests that the file has an outcome of are not run again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

WHY_CHARS_MAX = 400
LINES = Path(os.environ["OUTCOME_LINES"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what an earlier run has reached."""
    lines = LINES.read_text().splitlines() if LINES.exists() else []
    reached = {json.loads(line)["test"] for line in lines}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in reached])
    items[:] = [item for item in items if item.nodeid not in reached]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test counts once: by its call, or by the part that did not let it run."""
    if report.when == "call" or (report.when == "setup" and not report.passed):
        _write(report.nodeid, report.outcome, _why(report), report.duration)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported is a test that was skipped, with the reason."""
    if report.failed:
        _write(report.nodeid, "skipped", f"cannot be imported: {_why(report)}", 0.0)


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:WHY_CHARS_MAX]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message) if crash else report.longreprtext.strip().splitlines()[-1]
    return text[:WHY_CHARS_MAX]


def _write(test: str, outcome: str, why: str, took_s: float) -> None:
    with LINES.open("a") as lines:
        lines.write(json.dumps({"test": test, "outcome": outcome, "why": why, "took_s": round(took_s, 2)}) + "\n")
