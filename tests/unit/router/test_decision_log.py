"""Decisions are remembered, within bounds, and told as they were made and as they turned out."""

from __future__ import annotations

import pytest

from services.router.placement.decision_log import (
    BASE_BYTES,
    CANDIDATE_BYTES,
    LISTED_MAX,
    Asked,
    Choice,
    DecisionLog,
    Outcome,
    Wanted,
    router_of,
)
from shared.contracts.decisions import Candidate, Part, TtftParts
from shared.contracts.ids import RequestId, RouterId, WorkerId

ROOMY = {"count_max": 1000, "bytes_max": 10_000_000}


class FakeConsidered:
    """As many candidates as there are seconds; asks are counted."""

    def __init__(self, *prefill_s: float, count: int = 0) -> None:
        self.count = count or len(prefill_s)
        self.prefill_s = prefill_s
        self.asks = 0

    def candidates(self) -> list[Candidate]:
        self.asks += 1
        return [
            Candidate(worker_id=WorkerId(f"p{n}"), part=Part.WHOLE, chosen=n == 0, prefill_s=s, cost_s=s)
            for n, s in enumerate(self.prefill_s)
        ]


def make_log(**bounds: int) -> DecisionLog:
    return DecisionLog(RouterId("router-ab"), **{**ROOMY, **bounds})


def asked(request_id: str = "r1", **fields) -> Asked:
    return Asked(request_id=RequestId(request_id), model="m", at_unix_s=5.0, **fields)


def whole(worker: str = "p0", **fields) -> Choice:
    return Choice(mode="aggregated", reason="least time", decode_worker=worker, **fields)


def test_a_decision_is_found_by_its_id_and_told_with_its_candidates():
    log = make_log()

    entry = log.made(asked(prompt_tokens=9, exact=True), whole(considered=FakeConsidered(1.0, 2.0), cached_tokens=4))

    told = log.find(entry.decision_id)
    assert told is not None
    assert (told.decision_id, told.router_id, told.request_id) == ("router-ab-d1", "router-ab", "r1")
    assert (told.mode, told.decode_worker, told.outcome, told.measured) == ("aggregated", "p0", "", None)
    assert [(one.worker_id, one.chosen) for one in told.candidates] == [("p0", True), ("p1", False)]
    assert (told.considered, told.predicted_cached_tokens, told.cached_tokens) == (2, 4, -1)
    assert told.regret_s == -1


def test_what_came_of_it_is_told_with_the_regret():
    log = make_log()
    entry = log.made(asked(), whole(considered=FakeConsidered(1.0, 1.5), predicted=TtftParts(prefill_s=1.0)))

    parts = TtftParts(tokenize_s=0.25, prefill_s=2.0)
    entry.outcome = Outcome(outcome="ok", measured=parts, ttft_s=2.25, cached_tokens=3)

    told = log.find(entry.decision_id)
    assert told is not None
    assert (told.outcome, told.ttft_s, told.measured) == ("ok", 2.25, parts)
    assert told.regret_s == pytest.approx(0.5)


def test_the_log_makes_no_candidates_until_somebody_asks():
    log, considered = make_log(), FakeConsidered(1.0)

    entry = log.made(asked(), whole(considered=considered))
    assert considered.asks == 0
    log.find(entry.decision_id)

    assert considered.asks == 1


def test_the_oldest_are_forgotten_beyond_the_count():
    log = make_log(count_max=3)

    ids = [log.made(asked(f"r{n}"), whole()).decision_id for n in range(5)]

    assert [log.find(one) is not None for one in ids] == [False, False, True, True, True]
    assert len(log) == 3


def test_the_oldest_are_forgotten_beyond_the_bytes_and_wide_decisions_count_for_more():
    wide = 20
    log = make_log(bytes_max=2 * (BASE_BYTES + wide * CANDIDATE_BYTES))

    ids = [log.made(asked(), whole(considered=FakeConsidered(1.0, count=wide))).decision_id for _ in range(3)]

    assert [log.find(one) is not None for one in ids] == [False, True, True]
    assert log.bytes_held <= 2 * (BASE_BYTES + wide * CANDIDATE_BYTES)


def test_a_single_decision_beyond_the_bytes_is_forgotten_at_once_and_does_no_harm():
    log = make_log(bytes_max=BASE_BYTES - 1)

    entry = log.made(asked(), whole())
    entry.outcome = Outcome(outcome="ok")

    assert log.find(entry.decision_id) is None
    assert (len(log), log.bytes_held, log.newest()) == (0, 0, None)


@pytest.mark.parametrize(
    "wrong",
    ["", "router-ab-d", "router-ab-d0", "router-ab-d2", "router-ab-d01", "router-xy-d1", "1", "router-ab-d-1", "latest",
     "router-ab-d" + "9" * 5000, "router-ab-d\u0661"],
)  # fmt: skip
def test_an_id_that_was_never_given_finds_nothing(wrong):
    log = make_log()
    log.made(asked(), whole())

    assert log.find(wrong) is None


def test_the_newest_and_those_of_a_request_come_newest_first():
    log = make_log()
    for attempt, request in ((1, "r1"), (2, "r1"), (1, "r2")):
        log.made(asked(request, attempt=attempt), whole())

    assert [one.attempt for one in log.of_request("r1")] == [2, 1]
    newest = log.newest()
    assert newest is not None
    assert newest.request_id == "r2"


def test_a_list_is_filtered_bounded_and_without_candidates():
    log = make_log()
    for n in range(300):
        entry = log.made(asked(f"r{n}", ttft_target_s=0.5), whole(f"w{n % 2}", considered=FakeConsidered(1.0)))
        entry.outcome = Outcome(outcome="ok" if n % 3 else "worker_lost", ttft_s=n / 100)

    assert len(log.listed(Wanted(limit=10**6))) == LISTED_MAX
    assert [one.request_id for one in log.listed(Wanted(limit=2))] == ["r299", "r298"]
    assert log.listed(Wanted(limit=-5)) == []
    assert {one.decode_worker for one in log.listed(Wanted(worker_id="w1"))} == {"w1"}
    assert {one.outcome for one in log.listed(Wanted(outcome="worker_lost"))} == {"worker_lost"}
    assert [one.request_id for one in log.listed(Wanted(ttft_s_min=2.99))] == ["r299"]
    assert len(log.listed(Wanted(missed=True, worker_id="w0", limit=200))) == LISTED_MAX
    assert all(one.ttft_s > 0.5 for one in log.listed(Wanted(missed=True)))
    assert all(one.candidates == [] for one in log.listed(Wanted()))


def test_a_refusal_is_a_decision_without_workers():
    log = make_log()

    entry = log.made(asked(), Choice(mode="", reason="All workers of this model are full."))

    told = log.find(entry.decision_id)
    assert told is not None
    assert (told.mode, told.decode_worker, told.candidates, told.considered) == ("", "", [], 0)


def test_the_id_says_which_router_made_it():
    assert router_of("my-d-router-3f-d17") == "my-d-router-3f"
    assert [router_of(one) for one in ("", "latest", "r1", "x-d", "x-dy")] == [""] * 5
