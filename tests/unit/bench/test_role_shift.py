"""What the role-shift benchmark counts as good, and when."""

from __future__ import annotations

from bench.bench_role_shift import ANSWERS, FLEETS, PROMPTS, SLO, Ran, arrivals, good_share, row
from bench.live_client import Outcome
from replay.traces import Request


def outcome(at_s: float, ttft_s: float, itl_s: float, status: int = 200, events: int = 11) -> Outcome:
    request = Request(at_s, (), 100, 11)
    first = at_s + ttft_s
    return Outcome(request, status=status, first_at=first, last_at=first + 10 * itl_s, events=events)


def test_every_fleet_gets_the_same_requests_which_turn_from_prompts_to_answers():
    requests = [*arrivals(0, 100.0)]

    assert requests == [*arrivals(0, 100.0)]
    assert [one.at_s for one in requests] == sorted(one.at_s for one in requests)
    for phase, (from_s, to_s) in ((PROMPTS, (0.0, 100.0)), (ANSWERS, (100.0, 200.0))):
        mine = [one for one in requests if from_s <= one.at_s < to_s]
        assert {(one.input_tokens, one.output_tokens) for one in mine} == {(phase.prompt_tokens, phase.answer_tokens)}
        assert 0.8 < len(mine) / (100.0 * phase.rate) < 1.2


def test_rejected_cut_and_late_requests_are_not_good():
    outcomes = [
        outcome(1.0, 0.1, 0.01),
        outcome(2.0, SLO.ttft_s + 0.1, 0.01),
        outcome(3.0, 0.1, SLO.itl_s + 0.01),
        outcome(4.0, 0.0, 0.0, status=503, events=0),
        outcome(5.0, 0.1, 0.01, events=10),
        outcome(11.0, 0.1, 0.01),
        outcome(15.0, 0.2, 0.02),
    ]

    assert good_share(outcomes, 0.0, 10.0) == 0.2
    assert row(Ran(FLEETS[0], outcomes), 10.0) == ["1P+3D", "20%", "100%", "100%", "43%", "0.20", "20", "1"]
