"""The check of a chaos run finds outcomes that are not permitted, and accepts the others."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from services.worker.engines.simulated.responses import (
    CompletionResponses,
    Ending,
    MessageObjects,
    ResponseObjects,
    Responses,
    usage_of,
)
from shared.contracts.engine_paths import COMPLETIONS, MESSAGES, RESPONSES
from tests.nightly.chaos.apis import read_event
from tests.nightly.chaos.faults import Fault, Kind, Part
from tests.nightly.chaos.keys import REFUSED, RELOAD_S_MAX, REVOCABLE
from tests.nightly.chaos.oracle import OTHER_MODEL
from tests.nightly.chaos.outcomes import (
    BUS_AWAY_S_MIN,
    UNREADY_S_MAX,
    BatchOutcome,
    Happened,
    Limits,
    LineOutcome,
    Outcome,
    batch_violations,
    failures,
    violations,
)
from tests.nightly.chaos.trace import Ask, Batch

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
        {"disorder": "event 3 came as number 2"},
        {"left": True, "text": " one three"},
        {"left": True, "code": "worker_lost", "status": 502, "text": "", "finishes": [], "dones": 0},
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


@pytest.mark.parametrize("kind", sorted(set(Kind) - {Kind.LOSE}))
def test_a_worker_that_breaks_is_no_excuse(kind):
    assert judge(failed("worker_lost", status=502), faults=[happened(kind, Part.WORKER, "w1", 1.5, 9.0)]) != []


OPERATORS = (Kind.RESTART, Kind.DRAIN, Kind.ROLE)


@pytest.mark.parametrize("kind", [*OPERATORS, Kind.SHAPE, Kind.DELAY, Kind.EXHAUST])
@pytest.mark.parametrize("part", [Part.WORKER, Part.ROUTER, Part.ORCHESTRATOR])
def test_what_operators_do_and_slow_links_and_idle_clients_are_no_excuse(kind, part):
    faults = [happened(kind, part, "r1", 1.5, 9.0)]
    cut = outcome(is_cut=True, status=0, text="", finishes=[], dones=0)

    assert judge(failed("bus_down"), faults=faults) != []
    assert judge(cut, faults=faults) != []
    assert judge(outcome(ended_s=40.0), faults=faults) != []


@pytest.mark.parametrize("kind", [Kind.CUT, Kind.VANISH])
def test_a_router_that_is_cut_off_excuses_its_own_requests(kind):
    faults = [happened(kind, Part.ROUTER, "r1", 1.5, 1.5 + 2 * BUS_AWAY_S_MIN)]

    assert judge(failed("bus_down"), faults=faults) == []
    assert judge(failed("bus_down", router="r2"), faults=faults) != []


def test_nats_is_an_excuse_if_it_was_away_for_long_and_lately():
    away = happened(Kind.KILL, Part.NATS, "nats", 1.5, 1.5 + 2 * BUS_AWAY_S_MIN)
    blinked = happened(Kind.KILL, Part.NATS, "nats", 1.5, 1.5 + BUS_AWAY_S_MIN / 2)

    assert judge(failed("bus_down"), faults=[away]) == []
    assert judge(failed("bus_down"), faults=[blinked]) != []
    assert judge(failed("bus_down", sent_s=20.0, ended_s=21.0), faults=[away]) != []


def test_a_router_that_has_long_said_it_is_not_ready_may_say_so_to_a_request():
    assert judge(failed("bus_down", unready_s=2 * BUS_AWAY_S_MIN)) == []
    assert judge(failed("bus_down", unready_s=BUS_AWAY_S_MIN / 2)) != []
    assert judge(failed("bus_down", unready_s=2 * UNREADY_S_MAX)) != []
    assert judge(failed("worker_lost", status=502, unready_s=2 * BUS_AWAY_S_MIN)) != []


def test_only_a_machine_that_could_not_run_excuses_overload_and_silence():
    assert judge(failed("overloaded", lag_s=0.5)) == []
    assert judge(failed("deadline", status=504, lag_s=0.5)) == []
    assert judge(failed("frames_lost", status=502, lag_s=0.5)) == []
    assert judge(failed("overloaded", lag_s=0.1)) != []
    assert judge(failed("engine_dead", status=502, lag_s=0.5)) != []


def test_a_killed_router_cuts_its_own_connections_and_no_others():
    faults = [happened(Kind.KILL, Part.ROUTER, "r1")]
    cut = {"is_cut": True, "status": 0, "text": "", "finishes": [], "dones": 0}

    assert judge(outcome(**cut), faults=faults) == []
    assert judge(outcome(**cut, router="r2"), faults=faults) != []


def test_a_frozen_router_may_be_late_by_its_frozen_time():
    faults = [happened(Kind.FREEZE, Part.ROUTER, "r1", 2.0, 7.0)]

    assert judge(outcome(ended_s=35.0), faults=faults) == []
    assert judge(outcome(ended_s=37.0), faults=faults) != []


REVOKED = [happened(Kind.REVOKE, Part.KEY, "key", 10.0, 20.0)]


@pytest.mark.parametrize("sent_s", [9.9, 15.0, 20.0 + RELOAD_S_MAX])
@pytest.mark.parametrize("code", REFUSED)
def test_a_revoked_key_is_refused(code, sent_s):
    refused = failed(code, status=REFUSED[code], sent_s=sent_s, ended_s=sent_s + 0.2)
    ask = replace(ASK, key=REVOCABLE)

    assert violations([ask], [refused], REVOKED, LIMITS) == []
    assert violations([ASK], [refused], REVOKED, LIMITS) != []
    assert violations([ask], [replace(refused, status=503)], REVOKED, LIMITS) != []
    assert violations([ask], [replace(refused, sent_s=30.0, ended_s=31.0)], REVOKED, LIMITS) != []


def test_a_revoked_key_is_served_until_routers_have_read_so_and_not_later():
    ask, late_s = replace(ASK, key=REVOCABLE), 10.1 + RELOAD_S_MAX

    assert violations([ask], [outcome(sent_s=10.1, ended_s=11.0)], REVOKED, LIMITS) == []
    assert violations([ask], [outcome(sent_s=late_s, ended_s=late_s + 1)], REVOKED, LIMITS) != []
    assert violations([ASK], [outcome(sent_s=late_s, ended_s=late_s + 1)], REVOKED, LIMITS) == []
    frozen = [*REVOKED, happened(Kind.FREEZE, Part.ROUTER, "r1", 9.0, 12.0)]
    assert violations([ask], [outcome(sent_s=late_s, ended_s=late_s + 1)], frozen, LIMITS) == []


@pytest.mark.parametrize(("model", "worker"), [(OTHER_MODEL, "w1"), (ASK.model, "w2")])
def test_an_answer_of_a_worker_of_another_model_is_a_violation(model, worker):
    ask, limits = replace(ASK, model=model), replace(LIMITS, other_workers=["w2"])

    assert violations([ask], [outcome(decode_worker=worker)], (), limits) != []
    assert violations([ask], [outcome(decode_worker={"w1": "w2", "w2": "w1"}[worker])], (), limits) == []


def test_a_client_that_leaves_needs_no_end_and_has_not_failed():
    left = outcome(left=True, text=" one", finishes=[], dones=0)

    assert judge(left) == []
    assert failures([left]) == []


def test_a_request_lost_on_a_kept_connection_needs_the_death_of_its_router():
    lost = outcome(is_cut=True, status=0, text="", finishes=[], dones=0, reused=True)

    assert judge(lost, faults=[happened(Kind.KILL, Part.ROUTER, "r1")]) == []
    assert judge(lost, faults=[happened(Kind.FREEZE, Part.ROUTER, "r1")]) != []


BATCH = Batch(number=0, at_s=1.0, lines=(ASK,))
RIGHT = LineOutcome(number=0, text=ASK.answer)


def judge_batch(*lines: LineOutcome, status: str = "completed", faults=()) -> list[str]:
    ended = BatchOutcome(number=0, sent_s=1.0, ended_s=9.0, status=status, lines=list(lines))
    return batch_violations([BATCH], [ended], faults, LIMITS)


def test_a_batch_whose_lines_are_all_answered_once_is_no_violation():
    assert judge_batch(RIGHT) == []


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ([], "completed"),
        ([RIGHT, RIGHT], "completed"),
        ([LineOutcome(number=0, text=" one")], "completed"),
        ([LineOutcome(number=0, code="worker_lost")], "completed"),
        ([LineOutcome(number=0, code="internal")], "completed"),
        ([LineOutcome(number=0, code="made_up")], "completed"),
        ([RIGHT], "failed"),
        ([], "lost"),
        ([], "never ended"),
    ],
    ids=str,
)
def test_any_other_batch_is_a_violation(lines, status):
    assert len(judge_batch(*lines, status=status)) == 1


def test_a_batch_that_was_never_sent_is_a_violation():
    assert batch_violations([BATCH], [], (), LIMITS) == ["batch 0 was never sent"]


def test_nats_that_forgets_loses_batches_and_makes_no_line_wrong():
    forgot = [happened(Kind.FORGET, Part.NATS, "nats")]

    assert judge_batch(status="lost", faults=forgot) == []
    assert judge_batch(LineOutcome(number=0, text=" one"), status="lost", faults=forgot) != []
    assert judge_batch(status="lost", faults=[happened(Kind.KILL, Part.NATS, "nats")]) != []


USAGE = usage_of(9, 2, 0)
STREAMS: dict[str, Responses] = {
    COMPLETIONS: CompletionResponses("m", "a"),
    MESSAGES: MessageObjects("m", "a", 9),
    RESPONSES: ResponseObjects("m", "a", None),
}


def events_of(path: str) -> list[str]:
    """The data of a stream of two tokens, as simulated engines send it."""
    made = STREAMS[path]
    raw = made.opening(0) + made.chunk(0, " one", Ending()) + made.chunk(0, " two", Ending("length", usage=USAGE))
    if path == MESSAGES:
        raw += made.usage(USAGE)
    raw += made.done
    return [line.removeprefix("data: ") for line in raw.decode().splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("path", STREAMS)
def test_events_are_read_as_clients_read_them(path: str):
    events = events_of(path)
    seen, doubled, lacking = (Outcome(number=0, router="r1", sent_s=0.0) for _ in range(3))
    for event in events:
        read_event(path, event, seen)
    for event in [*events[:2], *events[1:]]:
        read_event(path, event, doubled)
    for event in events[1:]:
        read_event(path, event, lacking)

    assert (seen.text, seen.finishes, seen.dones, seen.disorder) == (" one two", ["length"], 1, "")
    for wrong in (doubled, lacking):
        assert wrong.disorder or wrong.text != seen.text
    read_event(path, events[-1], seen)
    assert (seen.dones, seen.events_after_end) == (2, 1)


@pytest.mark.parametrize(
    "event",
    [
        {"error": {"code": "frames_lost"}},
        {"type": "error", "error": {"type": "api_error", "code": "frames_lost"}},
        {"type": "response.failed", "response": {"error": {"code": "frames_lost"}}},
        {"type": "error", "code": "frames_lost", "message": "", "param": None, "sequence_number": 7},
    ],
)
@pytest.mark.parametrize("path", STREAMS)
def test_an_error_in_a_stream_has_its_code(path: str, event: dict):
    seen = Outcome(number=0, router="r1", sent_s=0.0)

    read_event(path, msgspec.json.encode(event).decode(), seen)

    assert seen.code == "frames_lost"
