"""Running suites of others: what becomes of tests and reports."""

from __future__ import annotations

import sys

import pytest

from tests.outside.suite import Target, pytest_run
from tests.outside.suites.llm_comply import outcomes_of

THREE_TESTS = """
def test_first(): pass
def test_second(): assert False, "not now"
def test_third(): pass
"""


def run_three(folder, *, goes_on):
    return pytest_run(
        sys.executable,
        ["-c", "/dev/null", f"--rootdir={folder}", "test_three.py"],
        cwd=folder,
        folder=folder,
        target=Target("it", "", folder, goes_on=goes_on),
        s_max=120,
        env={},
    )


def found_by(run):
    assert not run.cut_off
    return {outcome.test.rpartition("_")[2]: outcome.outcome for outcome in run.outcomes}


@pytest.mark.slow
def test_each_test_has_its_own_outcome(tmp_path):
    (tmp_path / "test_three.py").write_text(THREE_TESTS)

    assert found_by(run_three(tmp_path, goes_on=False)) == {"first": "passed", "second": "failed", "third": "passed"}


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.slow
def test_a_run_that_goes_on_keeps_what_the_earlier_one_found_and_runs_the_rest(tmp_path, goes_on):
    (tmp_path / "test_three.py").write_text(THREE_TESTS)
    run_three(tmp_path, goes_on=False)
    (lines,) = tmp_path.glob("it.*.jsonl")
    first, second, _ = lines.read_text().splitlines(keepends=True)
    lines.write_text(first + second)
    (tmp_path / "test_three.py").write_text(THREE_TESTS.replace('assert False, "not now"', "pass"))

    again = "failed" if goes_on else "passed"
    assert found_by(run_three(tmp_path, goes_on=goes_on)) == {"first": "passed", "second": again, "third": "passed"}


def test_each_error_of_a_check_counts_by_itself_whatever_the_model_said():
    def found(text):
        quoted = f"output.0: {{'text': {text!r}}} is not valid under any of the given schemas"
        return {"id": "basic", "status": "failed", "errors": [quoted, "'error' is a required property"]}

    one, other = (outcomes_of("open-responses", found(text)) for text in ("one", "an [other] {text}"))

    assert one == other
    assert [outcome.why for outcome in one] == [
        "output.0: ... is not valid under any of the given schemas",
        "'error' is a required property",
    ]
