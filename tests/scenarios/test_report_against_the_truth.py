"""The same traffic is served in both modes in virtual time; the report sees one and estimates the other."""

from __future__ import annotations

import pytest

from replay.split import Split
from tests.scenarios.report_worlds import reported, traffic, truth

PROMPTS = (1100, 4000)
NEAR = 0.35
"""Allowed relative error of an estimate."""


@pytest.mark.parametrize(
    ("per_s", "out", "split", "worth"),
    [
        (4.0, (50, 300), Split(prefill=2, decode=2), "no"),
        (12.0, (50, 300), Split(prefill=2, decode=2), "yes"),
        (12.0, (100, 300), Split(prefill=1, decode=3), "no"),
    ],
    ids=["idle", "busy", "too few prefill workers"],
)
def test_the_estimate_matches_a_simulation_of_aggregated_serving(
    per_s: float, out: tuple[int, int], split: Split, worth: str
):
    requests = traffic(30.0, per_s, PROMPTS, out)

    (report,) = reported(requests, split)
    true = truth(requests, split.prefill + split.decode, report.tokens_min, report.tokens_max)

    assert report.worth == worth, report
    assert not report.measured
    assert (report.e2e_s < true.e2e_s / 1.1) == (worth == "yes")
    assert report.other_itl_s == pytest.approx(true.itl_s, rel=NEAR)
    assert report.other_e2e_s == pytest.approx(true.e2e_s, rel=NEAR)
