"""The check of a chaos run finds outcomes that are not permitted, and accepts the others."""

from __future__ import annotations

import msgspec
import pytest

from tests.nightly.chaos.faults import Fault, Kind, Part
from tests.nightly.chaos.outcomes import BUS_AWAY_S_MIN, Happened, Limits, Outcome, violations
from tests.nightly.chaos.trace import Ask
from tests.nightly.chaos.traffic import read_event

ASK = Ask(number=0, at_s=1.0, conversation=0, prompt=(10, 11), max_tokens=3, stream=True, answer=" one two three")
LIMITS = Limits(deadline_s=30.0, settle_s=5.0)


def outcome(**changes) -> Outcome:
    right = {"router": "r1", "sent_s": 1.0, "ended_s": 2.0, "status": 200, "text": ASK.answer}
    return Outcome(number=0, **{**right, "finishes": ["length"], "dones": 1, **changes})


def failed(code: str, **changes) -> Outcome:
    return outcome(**{"status": 503, "code": code, "text": "", "finishes": [], "dones": 0, **changes})


def happened(kind: Kind, part: Part, target: str, began_s=1.5, ended_s=1.8) -> Happened:
    fault = Fault(at_s=began_s, kind=kind, part=part, target=target, for_s=ended_s - began_s)
    return Happened(fault=fault, began_s=began_s, ended_s=ended_s)


def judge(*outcomes: Outcome, faults=()) -> list[str]:
    return violations([ASK], outcomes, faults, LIMITS)


def test_a_correct_response_in_time_is_no_violation():
    assert judge(outcome()) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"text": " one two four"},
        {"text": " one two"},
        {"text": " one two three three"},
        {"finishes": ["length", "length"]},
        {"finishes": []},
        {"dones": 0},
        {"dones": 2},
        {"events_after_end": 1},
        {"ended_s": 40.0},
        {"is_cut": True, "finishes": [], "dones": 0},
        {"code": "worker_lost", "finishes": [], "dones": 0},
        {"code": "internal", "status": 500, "text": "", "finishes": [], "dones": 0},
        {"code": "made_up", "status": 503, "text": "", "finishes": [], "dones": 0},
        {"code": "worker_lost", "status": 404, "text": "", "finishes": [], "dones": 0},
    ],
    ids=str,
)
def test_any_other_outcome_is_a_violation(wrong):
    assert len(judge(outcome(**wrong))) >= 1


def test_a_request_that_ends_twice_or_never_is_a_violation():
    assert judge(outcome(), outcome()) == ["#0 ended 2 times"]
    assert judge() == ["#0 never ended"]


def test_a_broken_stream_must_be_a_prefix_of_the_correct_answer():
    faults = [happened(Kind.LOSE, Part.WORKER, "w1")]

    assert judge(failed("frames_lost", status=200, text=" one"), faults=faults) == []
    assert judge(failed("frames_lost", status=200, text=" two"), faults=faults) != []


@pytest.mark.parametrize("kind", [Kind.KILL, Kind.FREEZE, Kind.CUT, Kind.DELAY])
def test_a_worker_that_breaks_is_no_excuse(kind):
    assert judge(failed("worker_lost", status=502), faults=[happened(kind, Part.WORKER, "w1")]) != []


def test_nats_is_an_excuse_if_it_was_away_for_long_and_lately():
    away = happened(Kind.KILL, Part.NATS, "nats", 1.5, 1.5 + 2 * BUS_AWAY_S_MIN)
    blinked = happened(Kind.KILL, Part.NATS, "nats", 1.5, 1.5 + BUS_AWAY_S_MIN / 2)

    assert judge(failed("bus_down"), faults=[away]) == []
    assert judge(failed("bus_down"), faults=[blinked]) != []
    assert judge(failed("bus_down", sent_s=20.0, ended_s=21.0), faults=[away]) != []


def test_a_killed_router_cuts_its_own_connections_and_no_others():
    faults = [happened(Kind.KILL, Part.ROUTER, "r1")]
    cut = {"is_cut": True, "status": 0, "text": "", "finishes": [], "dones": 0}

    assert judge(outcome(**cut), faults=faults) == []
    assert judge(outcome(**cut, router="r2"), faults=faults) != []


def test_a_frozen_router_may_be_late_by_its_frozen_time():
    faults = [happened(Kind.FREEZE, Part.ROUTER, "r1", 2.0, 7.0)]

    assert judge(outcome(ended_s=35.0), faults=faults) == []
    assert judge(outcome(ended_s=37.0), faults=faults) != []


def test_events_are_read_as_clients_read_them():
    seen = Outcome(number=0, router="r1", sent_s=0.0)
    chunks = [{"text": " one", "finish_reason": None}, {"text": " two", "finish_reason": "length"}]
    for chunk in chunks:
        read_event(msgspec.json.encode({"choices": [chunk]}).decode(), seen)
    read_event("[DONE]", seen)
    read_event(msgspec.json.encode({"choices": [chunks[0]]}).decode(), seen)

    assert (seen.text, seen.finishes, seen.dones, seen.events_after_end) == (" one two one", ["length"], 1, 1)
