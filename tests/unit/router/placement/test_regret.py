"""Regret: how much sooner the first token was predicted to come from another choice."""

from __future__ import annotations

import pytest

from services.router.placement.decision import best_other_s, regret_s
from shared.contracts.decisions import CandidateRecord, Part, TtftParts
from shared.contracts.ids import WorkerId


def one(part: Part, *, chosen: bool = False, **seconds: float) -> CandidateRecord:
    return CandidateRecord(worker_id=WorkerId("w"), part=part, chosen=chosen, **seconds)


PAIR = [
    one(Part.PREFILL, chosen=True, queue_s=0.1, prefill_s=0.2),
    one(Part.DECODE, chosen=True, handoff_s=0.05, decode_s=9.0),
]


def test_without_another_choice_nothing_is_regretted():
    assert regret_s(TtftParts(), TtftParts(prefill_s=60.0), PAIR) == 0


def test_nothing_is_known_before_the_first_token():
    assert regret_s(TtftParts(), None, PAIR) == -1


def test_another_prefill_worker_would_have_kept_the_decode_worker():
    others = [one(Part.PREFILL, fetch_s=0.1, prefill_s=0.3), one(Part.PREFILL, queue_s=5.0)]

    assert best_other_s([*PAIR, *others]) == pytest.approx(0.4 + 0.05)


def test_another_decode_worker_counts_by_its_handoff_and_not_by_its_speed():
    assert best_other_s([*PAIR, one(Part.DECODE, handoff_s=0.01, decode_s=100.0)]) == pytest.approx(0.31)


def test_one_worker_for_both_legs_is_another_choice_for_a_pair_and_the_other_way_round():
    whole = one(Part.WHOLE, queue_s=0.15, prefill_s=0.05)

    assert best_other_s([*PAIR, whole]) == pytest.approx(0.2)
    unchosen = [one(Part.PREFILL, prefill_s=0.2), one(Part.DECODE, handoff_s=0.05)]
    assert best_other_s([*unchosen, one(Part.WHOLE, chosen=True)]) == pytest.approx(0.25)


def test_what_the_router_spent_itself_would_have_been_the_same():
    measured = TtftParts(admission_s=7.0, tokenize_s=1.0, place_s=0.5, failed_s=2.0, prefill_s=0.5, transit_s=0.25)
    predicted = TtftParts(first_token_s=0.05, transit_s=0.1)

    regret = regret_s(predicted, measured, [*PAIR, one(Part.WHOLE, prefill_s=0.25)])

    assert regret == pytest.approx(0.75 - (0.25 + 0.05 + 0.1))


def test_a_measured_time_that_beats_every_prediction_is_no_negative_regret():
    assert regret_s(TtftParts(), TtftParts(prefill_s=0.1), [*PAIR, one(Part.WHOLE, prefill_s=0.5)]) == 0
