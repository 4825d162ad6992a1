"""Regret: by how much the best alternative's predicted TTFT is lower."""

from __future__ import annotations

import pytest

from services.router.decisions.decision import best_other_s, regret_s
from shared.contracts.decisions import CandidateRecord, Part, TtftParts
from shared.contracts.ids import WorkerId


def one(part: Part, *, chosen: bool = False, **seconds: float) -> CandidateRecord:
    return CandidateRecord(worker_id=WorkerId("w"), part=part, chosen=chosen, **seconds)


PAIR = [
    one(Part.PREFILL, chosen=True, queue_s=0.1, prefill_s=0.2),
    one(Part.DECODE, chosen=True, handoff_s=0.05, decode_s=9.0),
]


def test_without_an_alternative_there_is_no_regret():
    assert regret_s(TtftParts(), TtftParts(prefill_s=60.0), PAIR) == 0


def test_regret_is_unknown_before_the_first_token():
    assert regret_s(TtftParts(), None, PAIR) == -1


def test_alternatives_for_prefill_keep_the_decode_worker():
    others = [one(Part.PREFILL, fetch_s=0.1, prefill_s=0.3), one(Part.PREFILL, queue_s=5.0)]

    assert best_other_s([*PAIR, *others]) == pytest.approx(0.4 + 0.05)


def test_alternatives_for_decode_differ_by_handoff_not_speed():
    assert best_other_s([*PAIR, one(Part.DECODE, handoff_s=0.01, decode_s=100.0)]) == pytest.approx(0.31)


def test_aggregated_and_disaggregated_placements_are_alternatives_of_each_other():
    whole = one(Part.WHOLE, queue_s=0.15, prefill_s=0.05)

    assert best_other_s([*PAIR, whole]) == pytest.approx(0.2)
    unchosen = [one(Part.PREFILL, prefill_s=0.2), one(Part.DECODE, handoff_s=0.05)]
    assert best_other_s([*unchosen, one(Part.WHOLE, chosen=True)]) == pytest.approx(0.25)


def test_a_first_token_that_needs_no_handoff_is_compared_without():
    whole = one(Part.WHOLE, prefill_s=0.2)

    assert best_other_s([*PAIR, one(Part.DECODE, handoff_s=0.01)], handoff_counts=False) == pytest.approx(0.3)
    measured = TtftParts(prefill_s=0.5)
    assert regret_s(TtftParts(prefill_s=0.3), measured, [*PAIR[:1], one(Part.DECODE, chosen=True), whole]) == (
        pytest.approx(0.3)
    )


def test_the_routers_own_time_is_no_regret():
    measured = TtftParts(
        admission_s=7.0, tokenize_s=1.0, place_s=0.5, failed_s=2.0, prefill_s=0.5, front_end_and_bus_s=0.25
    )
    predicted = TtftParts(decode_prefill_s=0.05, front_end_and_bus_s=0.1)

    regret = regret_s(predicted, measured, [*PAIR, one(Part.WHOLE, prefill_s=0.25, front_end_and_bus_s=0.1)])

    assert regret == pytest.approx(0.75 - (0.25 + 0.1))


def test_regret_is_never_negative():
    assert regret_s(TtftParts(), TtftParts(prefill_s=0.1), [*PAIR, one(Part.WHOLE, prefill_s=0.5)]) == 0
