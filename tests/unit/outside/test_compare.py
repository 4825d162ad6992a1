"""Suites of others: what counts as a difference, and what a run of some suites leaves of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.outside import compare, page
from tests.outside.compare import Comparison
from tests.outside.suite import Outcome, Run


def run(**outcomes: str) -> Run:
    return Run(
        [
            Outcome(test, outcome, "" if outcome == "passed" else f"{test} is wrong")
            for test, outcome in outcomes.items()
        ]
    )


def compared(one_engine: Run, pd: Run, suite: str = "s") -> Comparison:
    return Comparison(suite, "What it is", "1.0", one_engine, pd)


@pytest.fixture
def known(tmp_path: Path) -> Path:
    file = tmp_path / "known.toml"
    file.write_text('[s]\n"*streams*" = "Baton sends more pieces."\n')
    return file


def differences(result: Comparison, known: Path) -> list[tuple[str, str, str]]:
    return [(one.test, one.pd, one.reason) for one in result.differences(known)]


def test_a_failure_only_on_pd_is_a_difference_with_what_it_reported(known):
    result = compared(run(a="passed", b="passed"), run(a="passed", b="failed"))

    (difference,) = result.differences(known)

    assert (difference.test, difference.one_engine, difference.pd) == ("b", "passed", "failed")
    assert difference.why == "b is wrong"
    assert not difference.reason


def test_a_test_that_one_run_did_not_reach_is_a_difference(known):
    assert differences(compared(run(a="passed"), run()), known) == [("a", compare.NOT_REACHED, "")]


def test_of_a_run_that_was_cut_off_only_what_both_reached_is_compared(known):
    cut = Run(run(a="failed").outcomes, cut_off=True)

    assert differences(compared(run(a="passed", b="passed"), cut), known) == [("a", "failed", "")]


def test_failures_on_both_are_no_differences_but_named(known):
    result = compared(run(a="failed"), run(a="failed"))

    assert not result.differences(known)
    assert result.neither() == [("a", "a is wrong")]


def test_a_known_reason_explains_only_tests_of_its_suite(known):
    one, pd = run(test_streams_x="passed"), run(test_streams_x="failed")

    assert differences(compared(one, pd), known) == [("test_streams_x", "failed", "Baton sends more pieces.")]
    assert differences(compared(one, pd, suite="other"), known) == [("test_streams_x", "failed", "")]


def test_a_run_of_one_suite_leaves_the_rows_and_sections_of_others(tmp_path):
    out, order = tmp_path / "OUTSIDE.md", ["first", "second"]
    same = run(a="passed")
    page.write(out, {name: page.compared(compared(same, same, name), "Run once.") for name in order}, order)

    page.write(out, {"second": page.not_run("second", "What it is", "no network | here")}, order)

    parts = page.read(out)
    assert list(parts) == order
    assert "Run once." in parts["first"].section
    assert "| 1 | 1 |" in parts["first"].row
    assert "Not run: no network \\| here" in parts["second"].section
    assert out.read_text().count("## second") == 1


def test_differences_with_one_reason_are_listed_together():
    failed = Run([Outcome(test, "failed", "It is wrong.") for test in ("a", "b")])
    result = compared(run(a="passed", b="passed"), failed, "first")

    (differences,) = [line for line in page.compared(result, "Run once.").section.splitlines() if line[:4] == "* 2,"]

    assert differences == "* 2, passed and failed: **unexplained**: It is wrong. (`a`, `b`)"


def test_the_reasons_on_file_name_suites_that_exist():
    from tests.outside.__main__ import BY_NAME

    assert compare.known_reasons_by_suite(compare.KNOWN).keys() <= BY_NAME.keys()
