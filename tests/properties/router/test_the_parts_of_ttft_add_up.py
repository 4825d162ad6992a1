"""Whatever the router measured and the workers report: the parts are never negative and add up to the whole."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from services.router.request.timings import Timings
from services.router.telemetry.ttft import Legs, covered_s, exchanging_s, ttft_parts, ttft_s
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import LegReport
from shared.contracts.kv_exchange import KvRead, KvTransferReport

seconds = st.one_of(st.just(0.0), st.floats(0.0, 1000.0))
instants = st.one_of(st.just(0.0), st.floats(1e-3, 1e6))

reads = st.builds(
    KvRead,
    worker_id=st.just(WorkerId("s")),
    epoch=st.just(Epoch(1)),
    requested_at=instants,
    granted_at=instants,
    read_at=instants,
    ended_at=instants,
)
"""Any order of instants: what another process says of itself need not make sense."""
transfer_reports = st.none() | st.builds(KvTransferReport, reads=st.lists(reads, max_size=4))
reports = st.builds(
    LegReport, queue_s=seconds, prefill_s=seconds, first_token_s=seconds, total_s=seconds, kv=transfer_reports
)
routers = st.builds(Timings, admission_s=seconds, tokenize_s=seconds, place_s=seconds, failed_s=seconds)
legs_of = st.builds(Legs, answering=reports, prefill=st.none() | reports, streamed=st.booleans())


@given(whole_s=seconds, router=routers, legs=legs_of)
def test_parts_are_not_negative_and_add_up(whole_s: float, router: Timings, legs: Legs):
    parts = ttft_parts(whole_s, router, legs)

    values = [getattr(parts, name) for name in parts.__struct_fields__]
    assert all(value >= 0 for value in values)
    assert math.isclose(parts.total_s(), whole_s, rel_tol=1e-12, abs_tol=1e-12)


@given(router=routers, report=reports, prefill=reports, more_s=seconds)
def test_consistent_measurements_are_reported_unchanged(
    router: Timings, report: LegReport, prefill: LegReport, more_s: float
):
    whole_s = (
        router.admission_s
        + router.tokenize_s
        + router.place_s
        + router.failed_s
        + sum(one.queue_s + one.prefill_s for one in (report, prefill))
        + more_s
    )

    parts = ttft_parts(whole_s, router, Legs(answering=report, prefill=prefill))

    assert math.isclose(parts.queue_s + parts.fetch_s, prefill.queue_s, rel_tol=1e-9, abs_tol=1e-9)
    assert math.isclose(parts.decode_queue_s + parts.handoff_s, report.queue_s, rel_tol=1e-9, abs_tol=1e-9)
    assert math.isclose(parts.front_end_and_bus_s, more_s, rel_tol=1e-9, abs_tol=1e-9)
    assert parts.decode_prefill_s <= report.prefill_s


@given(report=reports)
def test_a_leg_fetches_no_longer_than_it_is_queued(report: LegReport):
    assert 0 <= exchanging_s(report) <= report.queue_s


@given(first_s=seconds, report=st.none() | reports, stream=st.booleans())
def test_the_first_token_never_comes_after_the_first_data(first_s: float, report: LegReport | None, stream: bool):
    assert 0 <= ttft_s(first_s, report, stream=stream) <= first_s


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6), st.integers(0, 30))
def test_covered_time_is_counted_once(spans: list[tuple[int, int]], until: int):
    seconds_covered = {s for begin, end in spans for s in range(begin, min(end, until))}

    assert covered_s(spans, until) == len(seconds_covered)
