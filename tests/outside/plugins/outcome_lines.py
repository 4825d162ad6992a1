"""A pytest plugin: writes one JSON line per finished test to the file $OUTCOME_LINES, so that a run that is cut off by its
deadline loses only the tests that it did not reach.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

WHY_CHARS_MAX = 400


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test counts once: by its call, or by the part that did not let it run."""
    if report.when == "call" or (report.when == "setup" and not report.passed):
        _write(report.nodeid, report.outcome, _why(report))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported is a test that was skipped, with the reason."""
    if report.failed:
        _write(report.nodeid, "skipped", f"cannot be imported: {_why(report)}")


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:WHY_CHARS_MAX]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message) if crash else report.longreprtext.strip().splitlines()[-1]
    return text[:WHY_CHARS_MAX]


def _write(test: str, outcome: str, why: str) -> None:
    with Path(os.environ["OUTCOME_LINES"]).open("a") as lines:
        lines.write(json.dumps({"test": test, "outcome": outcome, "why": why}) + "\n")
