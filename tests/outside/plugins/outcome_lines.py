"""A pytest plugin: writes one JSON line per finished test to the file $OUTCOME_LINES, so that a run that is cut off by its
deadline loses only the tests that it did not reach. With $FILE_S_MAX set, the tests that are left when those of their file
have taken that long are not run.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

WHY_CHARS_MAX = 400
FILE_S_MAX = float(os.environ.get("FILE_S_MAX", "inf"))
NOT_REACHED = "not reached"
spent_s: Counter[str] = Counter()
"""By file."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the fixtures of the file, which may start what takes long."""
    if spent_s[_file(item.nodeid)] > FILE_S_MAX:
        pytest.skip(NOT_REACHED)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test counts once: by its call, or by the part that did not let it run."""
    spent_s[_file(report.nodeid)] += report.duration
    if report.when == "call" or (report.when == "setup" and not report.passed):
        why = _why(report)
        outcome = NOT_REACHED if why.endswith(f"Skipped: {NOT_REACHED}") else report.outcome
        _write(report.nodeid, outcome, why, report.duration)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported is a test that was skipped, with the reason."""
    if report.failed:
        _write(report.nodeid, "skipped", f"cannot be imported: {_why(report)}", 0.0)


def _file(node: str) -> str:
    return node.partition("::")[0]


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:WHY_CHARS_MAX]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message) if crash else report.longreprtext.strip().splitlines()[-1]
    return text[:WHY_CHARS_MAX]


def _write(test: str, outcome: str, why: str, took_s: float) -> None:
    with Path(os.environ["OUTCOME_LINES"]).open("a") as lines:
        lines.write(json.dumps({"test": test, "outcome": outcome, "why": why, "took_s": round(took_s, 2)}) + "\n")
