"""What clients want, from requests that ended."""

from __future__ import annotations

from services.orchestrator.planner.work import RequestWindow
from shared.contracts.decisions import TtftParts
from shared.contracts.ids import RequestId
from shared.contracts.inference import RequestFinished


def ended(status: int = 200, **numbers) -> RequestFinished:
    usual = {"prompt_tokens": 100, "completion_tokens": 10, "cached_tokens": 40, "mode": "disaggregated"}
    return RequestFinished(request_id=RequestId("r"), model="m", path="/", status=status, **{**usual, **numbers})


def test_demand_is_rates_and_means_of_the_window():
    window = RequestWindow(10.0, now=0.0)
    window.ended(ended(prompt_tokens=9999), 1.0)
    for at in range(12, 20):
        window.ended(ended(readback_tokens=20, ttft_s=0.5, itl_s=0.01), float(at))

    demand = window.observed(20.0).demand
    assert demand.requests_per_s == 0.8
    assert (demand.prompt_tokens, demand.uncached_tokens, demand.completion_tokens) == (100.0, 40.0, 10.0)
    assert (demand.ttft_s_p95, demand.itl_s_p95, demand.seconds) == (0.5, 0.01, 10.0)


def test_waiting_requests_follow_from_rate_and_wait():
    window = RequestWindow(10.0, now=0.0)
    for at in range(10):
        parts = TtftParts(admission_s=4.0, queue_s=1.0, decode_queue_s=0.5)
        window.ended(ended(ttft_parts=parts), float(at))

    observed = window.observed(10.0)
    assert observed.waiting == 4.0
    assert observed.demand.queue_s == 5.5


def test_rejected_requests_count_as_demand_invalid_and_cancelled_ones_do_not():
    window = RequestWindow(10.0, now=0.0)
    for status in (200, 503, 429, 400, 499, 500):
        window.ended(ended(status), 5.0)

    observed = window.observed(10.0)
    assert observed.demand.requests_per_s == 0.3
    assert observed.rejected_per_s == 0.2
    assert observed.demand.prompt_tokens == 100.0


def test_lines_of_batches_are_no_demand_and_their_share_of_the_work_is_told():
    window = RequestWindow(10.0, now=0.0)
    window.ended(ended(), 5.0)
    parts = TtftParts(admission_s=400.0)
    for status in (200, 503):
        line = ended(status, is_batch=True, prompt_tokens=220, completion_tokens=30, ttft_s=400.0, ttft_parts=parts)
        window.ended(line, 6.0)

    observed = window.observed(10.0)
    assert (observed.demand.requests_per_s, observed.rejected_per_s, observed.waiting) == (0.1, 0.0, 0.0)
    assert (observed.demand.prompt_tokens, observed.demand.queue_s, observed.demand.ttft_s_p95) == (100.0, 0.0, 0.0)
    assert (observed.prefill_share, observed.decode_share) == (60 / 240, 10 / 40)


def test_lines_of_batches_alone_leave_no_work_to_clients():
    window = RequestWindow(10.0, now=0.0)
    window.ended(ended(is_batch=True), 5.0)

    observed = window.observed(10.0)
    assert observed.demand.requests_per_s == 0.0
    assert (observed.prefill_share, observed.decode_share) == (0.0, 0.0)


def test_no_requests_give_zero_demand_over_the_observed_time():
    assert RequestWindow(10.0, now=5.0).observed(8.0).demand.seconds == 3.0
    assert RequestWindow(10.0, now=5.0).observed(8.0).demand.requests_per_s == 0.0
