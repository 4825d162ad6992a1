"""The run beside other routers prints no figure of requests that failed, were cut short, or were served in another way."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from bench.bench_peers import Figures, Measured, Row, Show, cpu_us, latency, main, measure, page, ratio, without_engines
from bench.load_client import HEAD_END, OFFER, PREFILL, SAME, TRANSFER, Answers, Connection, http_request
from bench.peer_checks import RunFailed, check_answers, check_decisions, check_legs

RESULT = {"sent": 10, "ended": 10, "errors": 0, "short": 0, "first_error": ""}
DECISION = {
    "decision_id": "d",
    "outcome": "ok",
    "mode": "disaggregated",
    "prefill_worker": "p",
    "decode_worker": "d",
    "exact": True,
    "why_inexact": "",
    "predicted_cached_tokens": 960,
    "cached_tokens": 960,
    "prompt_tokens": 1000,
}


def test_a_run_of_whole_answers_passes():
    check_answers(RESULT, 10)
    check_answers(RESULT)


@pytest.mark.parametrize("wrong", [{"errors": 1}, {"sent": 9}, {"ended": 9}])
def test_failed_or_missing_answers_fail_the_run(wrong):
    with pytest.raises(RunFailed):
        check_answers(RESULT | wrong, 10)


def test_a_run_without_requests_fails():
    with pytest.raises(RunFailed):
        check_answers(RESULT | {"sent": 0, "ended": 0})


def legs(prefill: int, decode: int, whole: int = 0) -> dict[str, int]:
    return {"prefill": prefill, "decode": decode, "whole": whole}


def test_one_prefill_and_one_decode_leg_per_request_pass():
    assert check_legs([legs(5, 0), legs(0, 5)], [legs(15, 0), legs(0, 15)], 10) == 0


def test_a_few_legs_that_a_router_sends_again_are_counted():
    assert check_legs([legs(0, 0)], [legs(11, 10)], 10) == 1
    assert check_legs([legs(0, 0)], [legs(1005, 1002)], 1000) == 7


@pytest.mark.parametrize("after", [legs(9, 10), legs(12, 10), legs(10, 9), legs(10, 10, 1), legs(0, 0, 10)])
def test_requests_that_were_not_disaggregated_fail_the_run(after):
    with pytest.raises(RunFailed):
        check_legs([legs(0, 0)], [after], 10)


def test_kept_exact_disaggregated_decisions_pass():
    check_decisions([DECISION] * 10, 10, next_turns=True)


@pytest.mark.parametrize(
    "wrong", [{"outcome": "timeout"}, {"outcome": ""}, {"mode": "aggregated"}, {"mode": ""}, {"prefill_worker": ""}]
)
@pytest.mark.parametrize("next_turns", [True, False])
def test_another_placement_fails_the_run(wrong, next_turns):
    with pytest.raises(RunFailed):
        check_decisions([DECISION, DECISION | wrong], 2, next_turns=next_turns)


@pytest.mark.parametrize("wrong", [{"exact": False}, {"cached_tokens": 928}, {"predicted_cached_tokens": 992}])
def test_an_inexact_prefix_fails_a_run_of_next_turns(wrong):
    with pytest.raises(RunFailed):
        check_decisions([DECISION, DECISION | wrong], 2, next_turns=True)
    check_decisions([DECISION, DECISION | wrong], 2, next_turns=False)


def test_few_decisions_may_be_made_before_the_engines_word_of_the_turn_before():
    late = DECISION | {"cached_tokens": DECISION["predicted_cached_tokens"] + 96}

    check_decisions([DECISION, late], 2, next_turns=True)
    check_decisions([DECISION] * 998 + [late] * 10, 1008, next_turns=True)
    with pytest.raises(RunFailed):
        check_decisions([DECISION, late, late], 3, next_turns=True)


def test_next_turns_without_cached_history_fail_the_run():
    with pytest.raises(RunFailed):
        check_decisions([DECISION | {"cached_tokens": 0, "predicted_cached_tokens": 0}], 1, next_turns=True)


def test_decisions_that_were_not_kept_fail_the_run():
    with pytest.raises(RunFailed):
        check_decisions([DECISION] * 9, 10, next_turns=False)


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


def asked(tokens: int, *, stream: bool) -> tuple[Answers, Connection]:
    """A client's connection that has sent a request for so many tokens."""
    answers = Answers(tokens, stream=stream)
    answers.measuring = True
    connection = Connection(answers, lambda _: None, iter(()))
    connection.transport = Wire()
    connection.send(b"POST", 0.0)
    return answers, connection


def chunked(*parts: bytes) -> bytes:
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def stream_of(tokens: int) -> bytes:
    return chunked(*[b'data: {"text":"a"}\n\n'] * tokens, b"data: [DONE]\n\n")


@pytest.mark.parametrize("cut_bytes", [1, 3, 11, 50])
def test_the_client_counts_events_that_a_router_cut_into_other_chunks(cut_bytes):
    answers, connection = asked(4, stream=True)
    text = b'data: {"text":"a"}\n\n' * 4 + b"data: [DONE]\n\n"

    pieces = [text[at : at + cut_bytes] for at in range(0, len(text), cut_bytes)]
    connection.data_received(chunked(*pieces))

    assert (answers.errors, answers.done, answers.events) == (0, 1, 5)


def whole_of(tokens: int) -> bytes:
    body = json.dumps({"usage": {"completion_tokens": tokens}}).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize("piece_bytes", [1, 7, 100_000])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("tokens", "short"), [(3, 1), (4, 0)])
def test_the_client_counts_short_answers_as_errors(piece_bytes, stream, tokens, short):
    answers, connection = asked(4, stream=stream)

    answer = stream_of(tokens) if stream else whole_of(tokens)
    for at in range(0, len(answer), piece_bytes):
        connection.data_received(answer[at : at + piece_bytes])

    assert (answers.ended, answers.short, answers.errors, answers.done) == (1, short, short, 1 - short)
    assert answers.events == (tokens + 1 if stream else 0)


def test_the_client_counts_a_refusal_as_one_error():
    answers, connection = asked(4, stream=False)

    connection.data_received(b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\n{}")

    assert (answers.ended, answers.errors, answers.done) == (1, 1, 0)
    assert answers.first_error.startswith("HTTP/1.1 503")


def test_a_lost_connection_is_an_error():
    answers, connection = asked(4, stream=True)

    connection.data_received(stream_of(4)[:-20])
    connection.connection_lost(None)

    assert answers.errors == 1


REQUEST = http_request({"prompt": "a", "max_tokens": 4})
OFFERED = {"remote_engine_id": "e", "remote_block_ids": [1, 2]}


def answer_of(tokens: int, **more: Any) -> bytes:
    body = json.dumps({"usage": {"completion_tokens": tokens}, **more}).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize(
    ("first_leg", "first_tokens", "passed_on"), [(SAME, 4, {}), (PREFILL, 1, {}), (OFFER, 1, {TRANSFER: OFFERED})]
)
def test_the_client_asks_two_servers_as_a_proxy_does(first_leg, first_tokens, passed_on):
    answers, first = asked(4, stream=False)
    first.partner = second = Connection(answers, lambda _: None, iter(()))
    second.transport = Wire()
    first.first_leg = first_leg

    first.send(REQUEST, 0.0)
    first.data_received(answer_of(first_tokens, **{TRANSFER: OFFERED}))
    second.data_received(answer_of(4))

    legs = [json.loads(one.transport.written[-1].partition(HEAD_END)[2]) for one in (first, second)]
    assert [leg["max_tokens"] for leg in legs] == [first_tokens, 4]
    assert (TRANSFER in legs[0]) == (first_leg == OFFER)
    assert legs[1] == {"prompt": "a", "max_tokens": 4, **passed_on}
    assert (answers.errors, answers.done) == (0, 1)


ROW = Row("short", 1, {"requests": 10}, "µs/request", cpu_us, 10)


@dataclass
class FakeContender:
    """A router that answers; from its ``fails_at``-th run on, not all requests."""

    name: str
    fails_at: int = 1000
    runs: list[int] = field(default_factory=list)
    is_direct: bool = False

    def measure(self, _row: Row, seed: int) -> tuple[float, dict[str, Any]]:
        self.runs.append(seed)
        check_answers(RESULT | {"errors": int(len(self.runs) >= self.fails_at)}, 10)
        return 0.001 * seed, RESULT


def test_every_router_runs_every_round_with_the_same_requests():
    routers = [FakeContender("a"), FakeContender("b")]

    measured: Measured = {}
    for number in range(5):
        measure([ROW], routers, number, measured)  # type: ignore[arg-type]

    assert [router.runs for router in routers] == [[1, 2, 3, 4, 5]] * 2
    assert measured["short"]["b"].values == pytest.approx([100, 200, 300, 400, 500])
    assert len(measured["short"]["b"].loops_ms) == 5


def test_one_failed_run_of_one_router_fails_all():
    with pytest.raises(RunFailed, match="b, short: 1 of 10"):
        measure([ROW], [FakeContender("a"), FakeContender("b", fails_at=1)], 0, {})  # type: ignore[arg-type]


def test_a_failed_run_exits_with_an_error_and_keeps_what_was_whole_before(capsys, tmp_path):
    out = tmp_path / "page.md"

    def run(_arguments: object, show: Show) -> None:
        show(["| of one round |"])
        show(["| of two rounds |"])
        raise RunFailed("a stream was short")

    with pytest.raises(SystemExit) as exited:
        main(["--quick", f"--out={out}"], run)

    assert exited.value.code == "no more figures: a stream was short"
    assert capsys.readouterr().out == ""
    text = out.read_text()
    assert "| of two rounds |" in text
    assert "| of one round |" not in text


def test_a_page_has_the_rows_and_rounds_that_were_measured():
    other = Row("long", 2, {"requests": 20}, "µs/request", cpu_us, 20)
    measured: Measured = {}
    for number in range(3):
        measure([ROW], [FakeContender("a"), FakeContender("b")], number, measured)  # type: ignore[arg-type]

    rows = [line.split(" | ") for line in page([ROW, other], measured, ["a", "b"], {}) if line.startswith("| ")]

    assert [row[0] for row in rows] == ["| ", "| short, µs/request"]
    assert rows[1][-2] == "3"


def test_the_engines_own_latency_is_taken_off_in_each_round():
    row = Row("latency", 1, {}, "ms", latency("p50"))
    of = {"Baton": Figures([5.0, 7.0], [1.0, 1.0]), "engines alone": Figures([2.0, 3.0], [1.0, 1.0])}

    assert without_engines(row, of)["Baton"].values == [3.0, 4.0]


def test_a_ratio_pairs_the_figures_of_each_round():
    assert ratio([2, 4, 6, 8, 10], [1, 2, 3, 4, 10]) == "2.00 (1.00 to 2.00)"
    assert ratio([1, 1, 1, 1, 1], [1, 1, 0, 1, 1]) == ""
