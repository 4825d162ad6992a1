"""Running suites of others: what becomes of tests and reports."""

from __future__ import annotations

import sys

from tests.outside.compare import NOT_REACHED
from tests.outside.suite import Target, pytest_run
from tests.outside.suites.llm_comply import outcomes_of

THREE_TESTS = """
def test_first(): pass
def test_second(): assert False, "not now"
def test_third(): pass
"""


def outcomes_of_files(folder, file_s_max):
    for name in ("test_one.py", "test_two.py"):
        (folder / name).write_text(THREE_TESTS)
    found = pytest_run(
        sys.executable,
        ["-c", "/dev/null", f"--rootdir={folder}", "test_one.py", "test_two.py"],
        cwd=folder,
        folder=folder,
        target=Target("it", "", folder),
        s_max=120,
        env={},
        file_s_max=file_s_max,
    )
    assert not found.cut_off
    return {outcome.test: outcome.outcome for outcome in found.outcomes}


def test_a_file_that_used_its_time_leaves_the_next_one_alone(tmp_path):
    found = outcomes_of_files(tmp_path, file_s_max=0)

    for file in ("test_one.py", "test_two.py"):
        names = ("first", "second", "third")
        assert [found[f"{file}::test_{name}"] for name in names] == ["passed", NOT_REACHED, NOT_REACHED]


def test_without_a_limit_each_test_has_its_own_outcome(tmp_path):
    assert sorted(outcomes_of_files(tmp_path, file_s_max=None).values()) == ["failed", "failed", *["passed"] * 4]


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
