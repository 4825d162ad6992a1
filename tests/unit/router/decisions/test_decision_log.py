"""The decision log is bounded and renders decisions with their outcome."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest

from services.router.decisions.decision import (
    BASE_BYTES,
    CANDIDATE_BYTES,
    CANDIDATES_SHOWN_MAX,
    LISTED_MAX,
    Decision,
    DecisionLog,
)
from services.router.decisions.decision_filter import DecisionFilter
from services.router.placement.candidates import Candidate
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.placement.slo import Targets
from services.router.placement.specification import Estimate
from services.router.request.facts import Mode
from services.router.state.worker_view import WorkerView
from shared.contracts.decisions import Part, TtftParts
from shared.contracts.failures import Reason
from shared.contracts.ids import RequestId, RouterId, router_of
from tests.support.fleet_builders import record

FIRST = f"router-ab-d{1:032x}"
ROOMY = {"bytes_max": 10_000_000}


class CountedCandidates:
    """Counts how often they are read, as what has to be rendered first."""

    def __init__(self, candidates: Iterable[Any]) -> None:
        self.candidates = candidates
        self.reads = 0

    def __iter__(self) -> Iterator[Any]:
        self.reads += 1
        return iter(self.candidates)


def view(worker_id: str) -> WorkerView:
    return WorkerView(record(worker_id), 0, 0.0)


def candidate(number: int, prefill_s: float) -> Candidate:
    nothing = Estimate(0, 0, 0, 0, 0, *[0.0] * (len(Estimate._fields) - 5))
    return Candidate(view(f"p{number}"), nothing._replace(prefill_s=prefill_s, whole_cost_s=prefill_s))


def whole(*prefill_s: float, worker: str = "p0", considered: int = 0, **fields: Any) -> Placement:
    """A placement on one worker, chosen as the first of candidates with these times."""
    candidates = [candidate(number, s) for number, s in enumerate(prefill_s)]
    return Placement(
        mode=Mode.AGGREGATED,
        decode=view(worker),
        why="least time",
        considered=considered or len(candidates),
        candidates=((Part.WHOLE, candidates, candidates[0]),) if candidates else (),
        **fields,
    )


def make_log(**bounds: int) -> DecisionLog:
    numbers = itertools.count(1)
    return DecisionLog(RouterId("router-ab"), lambda: f"{next(numbers):032x}", lambda: None, **{**ROOMY, **bounds})


def add(
    log: DecisionLog,
    result: Placement | Rejection | None = None,
    request_id: str = "r1",
    *,
    attempt: int = 1,
    exact: bool = False,
    **request: Any,
) -> Decision:
    asked = PlacementRequest(model="m", **request)
    result = result or whole()
    return log.add(RequestId(request_id), asked, result, at_unix_s=5.0, attempt=attempt, exact=exact)


def test_a_decision_is_found_by_id_with_its_candidates():
    log = make_log()

    decision = add(log, whole(1.0, 2.0, cached_tokens=4), prompt_tokens=9, exact=True)

    record = log.find(decision.decision_id)
    assert record is not None
    assert (record.decision_id, record.router_id, record.request_id) == (FIRST, "router-ab", "r1")
    assert (record.mode, record.decode_worker, record.outcome, record.measured) == ("aggregated", "p0", "", None)
    assert [(one.worker_id, one.chosen) for one in record.candidates] == [("p0", True), ("p1", False)]
    assert (record.considered, record.predicted_cached_tokens, record.cached_tokens) == (2, 4, -1)
    assert record.regret_s == -1


def test_an_ended_decision_shows_its_outcome_and_regret():
    log = make_log()
    decision = add(log, whole(1.0, 1.5, predicted=TtftParts(prefill_s=1.0)))

    parts = TtftParts(tokenize_s=0.25, prefill_s=2.0)
    decision.end("ok", measured=parts, ttft_s=2.25, cached_tokens=3)

    record = log.find(decision.decision_id)
    assert record is not None
    assert (record.outcome, record.ttft_s, record.measured) == ("ok", 2.25, parts)
    assert record.regret_s == pytest.approx(0.5)


def test_candidates_are_rendered_only_on_demand():
    log = make_log()
    placement = whole(1.0)
    candidates = CountedCandidates(placement.candidates)

    decision = add(log, msgspec.structs.replace(placement, candidates=candidates))
    assert candidates.reads == 0
    log.find(decision.decision_id)

    assert candidates.reads == 1


def test_a_record_shows_the_cheapest_candidates_and_the_chosen_one():
    chosen_is_dearest = whole(*(float(100 - number) for number in range(2 * CANDIDATES_SHOWN_MAX)))
    log = make_log()

    record = log.find(add(log, chosen_is_dearest).decision_id)

    assert record is not None
    assert len(record.candidates) == CANDIDATES_SHOWN_MAX
    assert record.candidates[-1].chosen
    costs = [one.cost_s for one in record.candidates]
    assert costs == sorted(costs)


def test_a_decision_keeps_no_block_hashes_of_the_prompt():
    hashes = tuple(range(1 << 62, (1 << 62) + 100))

    _decision = add(make_log(), whole(), hashes=hashes)

    assert sys.getrefcount(hashes) == 2


def test_the_oldest_are_dropped_beyond_the_bytes_and_candidates_count():
    wide = 20
    log = make_log(bytes_max=2 * (BASE_BYTES + wide * CANDIDATE_BYTES))

    ids = [add(log, whole(1.0, considered=wide)).decision_id for _ in range(3)]

    assert [log.find(one) is not None for one in ids] == [False, True, True]
    assert log.bytes_held <= 2 * (BASE_BYTES + wide * CANDIDATE_BYTES)


def test_a_decision_larger_than_the_log_is_dropped_at_once():
    log = make_log(bytes_max=BASE_BYTES - 1)

    decision = add(log)
    decision.end("ok")

    assert log.find(decision.decision_id) is None
    assert (len(log), log.bytes_held, log.newest_first()) == (0, 0, [])


@pytest.mark.parametrize(
    "wrong",
    ["", "router-ab-d", "router-ab-d1", FIRST[:-1] + "2", FIRST[:-1] + "A", FIRST + "1", f"router-xy-d{1:032x}", "1", "latest",
     "router-ab-d" + "9" * 5000, "router-ab-d\u0661"],
)  # fmt: skip
def test_unknown_ids_find_nothing(wrong):
    log = make_log()
    add(log)

    assert log.find(wrong) is None


def test_attempts_of_a_request_come_newest_first():
    log = make_log()
    for attempt, request_id in ((1, "r1"), (2, "r1"), (1, "r2")):
        add(log, request_id=request_id, attempt=attempt)

    assert [one.attempt for one in log.listed(DecisionFilter(request_id="r1"))] == [2, 1]
    assert log.newest_first()[0].request_id == "r2"


def test_a_list_is_filtered_bounded_and_without_candidates():
    log = make_log()
    for n in range(300):
        decision = add(log, whole(1.0, worker=f"w{n % 2}"), f"r{n}", targets=Targets(ttft_s=0.5))
        decision.end("ok" if n % 3 else "worker_lost", ttft_s=n / 100)

    assert len(log.listed(DecisionFilter(limit=10**6))) == LISTED_MAX
    assert [one.request_id for one in log.listed(DecisionFilter(limit=2))] == ["r299", "r298"]
    assert log.listed(DecisionFilter(limit=-5)) == []
    assert {one.decode_worker for one in log.listed(DecisionFilter(worker_id="w1"))} == {"w1"}
    assert {one.outcome for one in log.listed(DecisionFilter(outcome="worker_lost"))} == {"worker_lost"}
    assert [one.request_id for one in log.listed(DecisionFilter(ttft_s_min=2.99))] == ["r299"]
    assert len(log.listed(DecisionFilter(missed=True, worker_id="w0", limit=200))) == LISTED_MAX
    assert all(one.ttft_s > 0.5 for one in log.listed(DecisionFilter(missed=True)))
    assert all(one.candidates == [] for one in log.listed(DecisionFilter()))


def test_a_rejection_is_a_decision_without_workers():
    log = make_log()

    decision = add(log, Rejection(reason=Reason.WORKER_BUSY, message="All workers of this model are full."))

    record = log.find(decision.decision_id)
    assert record is not None
    assert (record.mode, record.decode_worker, record.candidates, record.considered) == ("", "", [], 0)
    assert record.reason == "All workers of this model are full."


def test_the_id_names_the_router_that_made_it():
    assert router_of(f"my-d-router-3f-d{17:032x}") == "my-d-router-3f"
    assert [router_of(one) for one in ("", "latest", "r1", "x-d", "x-d1", f"a.b-d{17:032x}")] == [""] * 6


def test_a_decision_of_another_tenant_is_not_found():
    log = make_log()
    mine, other = (add(log, tenant=tenant).decision_id for tenant in ("acme", "rival"))

    assert [log.find(one, "acme") is not None for one in (mine, other)] == [True, False]
    assert [one.decision_id for one in log.listed(DecisionFilter(tenant="acme"))] == [mine]
