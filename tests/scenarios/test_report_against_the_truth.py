"""The same traffic is served both ways in virtual time; the collector saw one of them and says what the other is."""

from __future__ import annotations

import pytest

from replay.world import Shape
from tests.scenarios.report_worlds import judged, traffic, truth

PROMPTS = (1100, 4000)
NEAR = 0.35
"""How far an estimate may be from the truth."""


@pytest.mark.parametrize(
    ("per_s", "out", "shape", "worth"),
    [
        (4.0, (50, 300), Shape(prefill=2, decode=2), "no"),
        (12.0, (50, 300), Shape(prefill=2, decode=2), "yes"),
        (12.0, (100, 300), Shape(prefill=1, decode=3), "no"),
    ],
    ids=["idle", "busy", "too few prefill workers"],
)
def test_a_verdict_is_what_comes_true(per_s: float, out: tuple[int, int], shape: Shape, worth: str):
    requests = traffic(30.0, per_s, PROMPTS, out)

    (told,) = judged(requests, shape)
    true = truth(requests, shape.prefill + shape.decode, told.tokens_min, told.tokens_max)

    assert told.worth == worth, told
    assert not told.measured
    assert (told.e2e_s < true.e2e_s / 1.1) == (worth == "yes")
    assert told.other_itl_s == pytest.approx(true.itl_s, rel=NEAR)
    assert told.other_e2e_s == pytest.approx(true.e2e_s, rel=NEAR)
